"""The background thread: when it is stuck."""

from __future__ import annotations

import threading

from torchmem.sdk.safety.cost import CpuMeter
from torchmem.sdk.sampler import Sampler


def test_a_thread_that_hangs_in_a_tick_is_stuck() -> None:
    """It may wait in the driver, so that the process's end must not read there."""
    entered, released = threading.Event(), threading.Event()

    def tick() -> bool:
        entered.set()
        return released.wait(60)

    sampler = Sampler(tick, 0.001, CpuMeter())
    sampler.start()
    assert entered.wait(60)
    is_stuck = sampler.stop(0.01)
    released.set()

    assert is_stuck
    assert not sampler.stop(60)


def test_a_thread_that_has_not_begun_is_not_stuck() -> None:
    """On a busy machine it may get no processor before the end of a short process."""
    for _ in range(20):
        sampler = Sampler(lambda: False, 3600.0, CpuMeter())
        sampler.start()
        assert not sampler.stop(0.0)
