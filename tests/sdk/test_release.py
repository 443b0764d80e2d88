"""The setting `release`: off by default, only at a step's end, and only where it pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.sdk._release import (
    MIN_RELEASABLE_BYTES,
    RECENT_WINDOWS,
    DeviceMemory,
    expected_regrowth,
    predicted_peak,
    should_release,
)
from torchmem.sdk._session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.card import CardUse, SimulatedCard

MIB = 1 << 20
TOTAL = 80 << 30
Opener = Callable[..., Session]
Published = Callable[[], list[dict[str, Any]]]
size = st.integers(0, TOTAL)
shares = st.floats(0.01, 0.99)
memories = st.builds(DeviceMemory, st.just(TOTAL), size, size, size, size)


@given(memories, shares)
def test_a_release_needs_a_shortage_and_a_gain(memory: DeviceMemory, share: float) -> None:
    """It needs little free driver memory, enough releasable bytes, and a small next step."""
    after_next_step = memory.driver_free + memory.releasable - expected_regrowth(memory)
    gain = after_next_step - memory.driver_free
    is_worth_it = memory.releasable >= MIN_RELEASABLE_BYTES and gain >= memory.releasable / 2
    is_short = memory.driver_free < share * memory.total

    assert should_release(memory, share) == (is_short and is_worth_it)


@given(memories, shares, size)
def test_a_higher_next_peak_never_makes_it_pay(
    memory: DeviceMemory, share: float, more: int
) -> None:
    """A release that pays with a higher expected peak also pays with a lower one."""
    higher = replace(memory, next_peak=memory.next_peak + more)

    assert should_release(memory, share) or not should_release(higher, share)
    assert 0 <= expected_regrowth(memory) <= expected_regrowth(higher) <= memory.releasable


@given(st.lists(size, max_size=10))
def test_the_prediction_needs_enough_windows(windows: list[int]) -> None:
    """With too few windows nothing is predicted; with enough, no recent peak is higher."""
    peak = predicted_peak(windows)

    assert (len(windows) < RECENT_WINDOWS) == (peak is None)
    assert peak is None or all(window <= peak for window in windows)


class CountingBackend(SimulatedBackend):
    """Records each emptying of the cache, and whether it happened in a step."""

    def __init__(self, card: SimulatedCard) -> None:
        self.allocator = DeviceCachingAllocator(card)
        super().__init__([self.allocator])

    stepping = False
    emptied: tuple[bool, ...] = ()

    def empty_cache(self) -> None:
        self.emptied = (*self.emptied, self.stepping)
        super().empty_cache()

    def step(self, optimizer: object = 0) -> None:
        self.stepping = True
        super().step(optimizer)
        self.stepping = False


@pytest.fixture
def card() -> SimulatedCard:
    """A card of 4 GiB that another process can fill."""
    return SimulatedCard(4096 * MIB, context_bytes=0, use=CardUse([0, 0]), uuid="GPU-1")


@pytest.fixture
def counting(card: SimulatedCard) -> CountingBackend:
    """A backend on that card."""
    return CountingBackend(card)


def train(backend: CountingBackend, *peaks: int) -> None:
    """Run a step for each peak in MiB, whose memory is allocated and freed before it ends."""
    for peak in peaks:
        backend.allocator.free(backend.allocator.malloc(peak * MIB))
        backend.step()


def test_by_default_the_cache_is_never_touched(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """Without the setting no cache is emptied however short memory is, and nothing is counted."""
    session = open_session(counting, interval=1e-9)
    train(counting, 3900, *[100] * 10)
    session.close()

    counters = published()[0]["devices"][0]["counters"]
    assert ((), None, None) == (counting.emptied, counters["releases"], counters["released_bytes"])


def test_after_a_change_of_phase_the_cache_is_released(
    counting: CountingBackend, card: SimulatedCard, open_session: Opener, published: Published
) -> None:
    """After enough small steps the cache is released once, at a step's end, and counted."""
    session = open_session(counting, interval=1e-9, release=0.3, release_interval=1e-9)
    train(counting, 3900, *[100] * (RECENT_WINDOWS - 1))
    assert ((), 196 * MIB) == (counting.emptied, card.mem_get_info()[0])

    train(counting, *[100] * 5)
    session.close()

    counters = published()[0]["devices"][0]["counters"]
    assert ((True,), 1, 3900 * MIB) == (
        counting.emptied,
        counters["releases"],
        counters["released_bytes"],
    )
    assert 0 == session.errors.counts["release"]


def test_steady_training_keeps_its_cache(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """A job that needs its cache again in every step keeps it, although the card is full."""
    session = open_session(counting, interval=1e-9, release=0.3, release_interval=1e-9)
    train(counting, *[3900] * 20)
    session.close()

    counters = published()[0]["devices"][0]["counters"]
    assert ((), 0, 0) == (counting.emptied, counters["releases"], counters["released_bytes"])


def test_checks_are_rate_limited(counting: CountingBackend, open_session: Opener) -> None:
    """Within `release_interval` the cache is emptied at most once."""
    open_session(counting, interval=1e-9, release=0.3, release_interval=3600.0)
    train(counting, *([3900, 100, 100, 100, 100] * 5))

    assert counting.emptied in {(), (True,)}


def test_peaks_stay_high_water_marks(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """A release resets the allocator's peaks; the published peak is that of the whole run."""
    session = open_session(counting, interval=1e-9, release=0.3)
    train(counting, 3900, 100, 100)
    session.close()

    assert 3900 * MIB == published()[0]["devices"][0]["allocator"]["active_peak_bytes"]


def test_a_failing_release_never_reaches_training(
    card: SimulatedCard, open_session: Opener
) -> None:
    """If emptying the cache raises, the step goes on and the error is counted."""

    class Failing(CountingBackend):
        def empty_cache(self) -> None:
            raise RuntimeError("broken driver")

    backend = Failing(card)
    session = open_session(backend, interval=1e-9, release=0.3, release_interval=1e-9)
    train(backend, 3900, *[100] * RECENT_WINDOWS)

    assert 1 == session.errors.counts["release"]
