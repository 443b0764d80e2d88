"""Starts measuring when the script has imported torch. A process that never does is unaffected."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def install() -> None:
    """Call `begin` after the first import of torch."""
    sys.meta_path.insert(0, _TorchFinder())


def begin() -> None:
    """Measure this process as its `ChildConfig` says, if it has one."""
    from torchmem.preflight.plan import ChildConfig

    config = ChildConfig.from_environment(os.environ)
    if config is None:
        return
    from torchmem import sdk
    from torchmem.preflight.child import torch_hooks
    from torchmem.preflight.child.exit import before_leaving
    from torchmem.preflight.child.watcher import StepWatcher

    if config.placement:
        from torchmem.preflight.child.distributed import lone_rank

        lone_rank(config.placement)
    backend = torch_hooks.WatchedBackend()
    session = sdk.instrument(backend=backend)
    watcher = StepWatcher(backend, session, config)
    backend.on_init(watcher.cuda_initialized)
    backend.on_step(lambda optimizer: watcher.optimizer_stepped(id(optimizer)))
    session.after_step = watcher.step_called
    torch_hooks.on_forward(watcher.phases.forward, watcher.forward_ended)
    torch_hooks.on_optimizer(watcher.phases.optimizer)
    torch_hooks.around_backward(watcher.backward_begins, watcher.backward_ended)
    torch_hooks.pass_distribution_checks()
    atexit.register(watcher.script_ended)
    before_leaving(watcher.script_ended)


class _TorchFinder(MetaPathFinder):
    """Finds torch once, the way Python would, with a loader that calls `begin`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _BeginningLoader(spec.loader)
        return spec


class _BeginningLoader(Loader):
    """Calls `begin` after the module was executed by its own loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        begin()
