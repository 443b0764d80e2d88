"""Starts measuring when the script has imported torch. A process that never does is unaffected."""

from __future__ import annotations

import os

from torchmem.startup.torch_import import after_torch_import


def install() -> None:
    """Call `begin` after the first import of torch."""
    after_torch_import(begin)


def begin() -> None:
    """Measure this process as its `ChildConfig` says, if it has one."""
    import atexit

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
    # First, because the watcher may end the process at this step.
    backend.on_step(watcher.marks.optimizer_stepped)
    backend.on_step(watcher.optimizer_stepped)
    session.lifetime.loop.after_step = watcher.step_called
    torch_hooks.on_forward(watcher.phases.forward, watcher.forward_ended)
    torch_hooks.on_optimizer(watcher.phases.optimizer)
    torch_hooks.around_backward(watcher.backward_begins, watcher.backward_ended)
    torch_hooks.pass_distribution_checks()
    atexit.register(watcher.script_ended)
    before_leaving(watcher.script_ended)
