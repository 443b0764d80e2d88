"""The beginning of our part in the script's process, called when torch has been imported."""

from __future__ import annotations

import atexit
import os

from torchmem.preflight.orders import Orders


def begin() -> None:
    """Watch this process as the parent's orders say; without orders nothing happens."""
    orders = Orders.given(os.environ)
    if orders is None:
        return
    from torchmem import sdk
    from torchmem.preflight.child import _torch
    from torchmem.preflight.child.stopping import before_leaving
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
