"""The beginning of our part in the script's process, called when torch has been imported.

Runs our part in the moment when the script has imported torch; a process that never does is left alone.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def begin() -> None:
    """Watch this process as the parent's orders say; without orders nothing happens."""
    from torchmem.preflight.plan import Orders

    orders = Orders.given(os.environ)
    if orders is None:
        return
    from torchmem import sdk
    from torchmem.preflight.child import _torch
    from torchmem.preflight.child.ending import before_leaving
    from torchmem.preflight.child.watch import Watch

    if orders.placement:
        from torchmem.preflight.child._distributed import lone_rank

        lone_rank(orders.placement)
    backend = _torch.WatchedBackend()
    session = sdk.instrument(backend=backend)
    watch = Watch(backend, session, orders)
    backend.on_init(watch.cuda_is_up)
    backend.on_step(watch.optimizer_stepped)
    session.after_step = watch.step_called
    _torch.on_first_forward(watch.phases.forward)
    _torch.on_optimizer(watch.phases.optimizer)
    _torch.around_backward(watch.phases.backward_begins, watch.backward_ended)
    atexit.register(watch.script_ended)
    before_leaving(watch.script_ended)


def install() -> None:
    """Wait for the import of torch."""
    sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(MetaPathFinder):
    """Finds torch as Python would, once, and has its loader call us when it is done."""

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
            spec.loader = _Announcing(spec.loader)
        return spec


class _Announcing(Loader):
    """A loader that begins our part after the module was executed."""

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
