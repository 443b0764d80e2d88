"""What the background thread does: publish, take snapshots within their budget, read when no step comes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from torchmem.sdk._cost import BACK_OFF_SECONDS, LONGEST_PAUSE_SECONDS, SLOW_READ_SECONDS, Cadence
from torchmem.sdk._session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend

MIB = 1 << 20


def test_statistics_and_layout_come_without_any_step(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Callable[..., Session],
    published: Callable[[], list[dict[str, Any]]],
) -> None:
    """An inference process that never steps still shows bytes, fragmentation and headroom."""
    first = allocator.malloc(400 * MIB)
    allocator.malloc(8 * MIB)
    allocator.free(first)
    open_session(backend, interval=0.01, idle_after=0.01)

    device = until(lambda: [d for sample in published() for d in sample["devices"] if d["layout"]])[
        0
    ]

    assert 420 * MIB == device["allocator"]["reserved_bytes"]["large"]
    assert 400 * MIB == device["layout"]["releasable_bytes"]
    assert 1004 * MIB == device["layout"]["headroom_flush_bytes"]


@given(st.floats(0, 10), st.floats(0.001, 100), st.floats(1e-4, 0.1), st.integers())
def test_reads_stay_within_their_budget(
    duration: float, interval: float, budget: float, seed: int
) -> None:
    """A pause is never shorter than half of what interval and budget ask for, up to the longest pause."""
    cadence = Cadence(interval, budget, random.Random(seed))
    cadence.spent(0.0, duration)
    wanted = min(max(interval, duration / budget), LONGEST_PAUSE_SECONDS)

    assert not cadence.is_due(0.499 * wanted)
    assert cadence.is_due(1.501 * max(wanted, BACK_OFF_SECONDS))


class Unreadable(SimulatedBackend):
    """A card whose layout cannot be read; knows whether it is just being asked in the main thread's midst."""

    in_the_midst = False

    def call_soon(self, call: Callable[[], None]) -> None:
        """At once."""
        self.in_the_midst = True
        super().call_soon(call)
        self.in_the_midst = False

    def memory_snapshot(self) -> None:
        """Fails."""
        raise RuntimeError("no layout")


class Listening(logging.Handler):
    """Notes for each message whether the script's own code may be in the midst of something then."""

    def __init__(self, backend: Unreadable) -> None:
        super().__init__()
        self.heard: dict[str, bool] = {}
        self._backend = backend

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        self.heard[record.getMessage()] = self._backend.in_the_midst


def test_nothing_is_logged_in_the_midst_of_the_script(
    allocator: DeviceCachingAllocator, open_session: Callable[..., Session]
) -> None:
    """What fails between two bytecodes of the script is logged elsewhere: there it may hold its own handler's lock."""
    backend = Unreadable([allocator])
    listening = Listening(backend)
    logger = logging.getLogger("torchmem")
    logger.addHandler(listening)
    try:
        open_session(backend, interval=0.01, idle_after=0.01)
        until(lambda: listening.heard)
    finally:
        logger.removeHandler(listening)

    assert {
        "torchmem: snapshot failed and is left out (RuntimeError: no layout)": False
    } == listening.heard


def test_a_slow_read_backs_off() -> None:
    """A read over 5 ms waited for the allocator's lock, so the next one waits at least half the back-off."""
    cadence = Cadence(0.01, 1.0, random.Random(1))
    cadence.spent(0.0, SLOW_READ_SECONDS * 1.01)

    assert not cadence.is_due(BACK_OFF_SECONDS / 2.01)
