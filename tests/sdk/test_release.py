"""Dynamic release: only when asked for, only at a step's end, only when the next step leaves it returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.sdk._release import (
    MIN_RELEASABLE_BYTES,
    RECENT_WINDOWS,
    Holdings,
    pays,
    predicted_peak,
    taken_back,
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
holdings = st.builds(Holdings, st.just(TOTAL), size, size, size, size)


@given(holdings, shares)
def test_a_release_is_due_only_when_short_and_worth_it(held: Holdings, share: float) -> None:
    """Nothing is released while the driver has enough, or too little could be, or the next step takes most back."""
    after_next_step = held.driver_free + held.releasable - taken_back(held)
    gain = after_next_step - held.driver_free
    worth_it = held.releasable >= MIN_RELEASABLE_BYTES and gain >= held.releasable / 2

    assert pays(held, share) == (held.driver_free < share * held.total and worth_it)


@given(holdings, shares, size)
def test_a_higher_next_peak_never_makes_it_pay(held: Holdings, share: float, more: int) -> None:
    """What pays with a higher expected peak pays with a lower one, too."""
    higher = Holdings(
        held.total, held.driver_free, held.active, held.releasable, held.next_peak + more
    )

    assert pays(held, share) or not pays(higher, share)
    assert 0 <= taken_back(held) <= taken_back(higher) <= held.releasable


@given(st.lists(size, max_size=10))
def test_the_prediction_needs_enough_windows(windows: list[int]) -> None:
    """With too few windows nothing is predicted; with enough, no recent peak is above the prediction."""
    peak = predicted_peak(windows)

    assert (len(windows) < RECENT_WINDOWS) == (peak is None)
    assert peak is None or all(window <= peak for window in windows)


class CountingBackend(SimulatedBackend):
    """Counts how often the cache is emptied, and where."""

    stepping = False
    emptied: tuple[bool, ...] = ()

    def empty_cache(self) -> None:
        self.emptied = (*self.emptied, self.stepping)
        super().empty_cache()

    def step(self, optimizer: int = 0) -> None:
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
    return CountingBackend([DeviceCachingAllocator(card)])


def train(backend: CountingBackend, *peaks: int) -> None:
    """A step for each peak in MiB: its memory is taken and given back before the step's end."""
    (allocator,) = backend._allocators.values()
    for peak in peaks:
        allocator.free(allocator.malloc(peak * MIB))
        backend.step()


def test_by_default_the_cache_is_never_touched(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """Without the setting no cache is emptied, however short memory is, and no release counter is shown."""
    session = open_session(counting, interval=1e-9)
    train(counting, 3900, *[100] * 10)
    session.close()

    counters = published()[0]["devices"][0]["counters"]
    assert ((), None, None) == (counting.emptied, counters["releases"], counters["released_bytes"])


def test_after_a_phase_switch_the_cache_goes_back(
    counting: CountingBackend, card: SimulatedCard, open_session: Opener, published: Published
) -> None:
    """Once enough small steps follow large ones, the cache is returned, at a step's end, once, and counted."""
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
    """A job that needs its cache again in every step keeps it, with the card full to the brim."""
    session = open_session(counting, interval=1e-9, release=0.3, release_interval=1e-9)
    train(counting, *[3900] * 20)
    session.close()

    counters = published()[0]["devices"][0]["counters"]
    assert ((), 0, 0) == (counting.emptied, counters["releases"], counters["released_bytes"])


def test_looks_are_rate_limited(counting: CountingBackend, open_session: Opener) -> None:
    """Within `release_interval` the cache is emptied at most once."""
    open_session(counting, interval=1e-9, release=0.3, release_interval=3600.0)
    train(counting, *([3900, 100, 100, 100, 100] * 5))

    assert counting.emptied in {(), (True,)}


def test_peaks_stay_high_water_marks(
    counting: CountingBackend, open_session: Opener, published: Published
) -> None:
    """Although a release resets the allocator's peaks, the published peak is that of the whole run."""
    session = open_session(counting, interval=1e-9, release=0.3)
    train(counting, 3900, 100, 100)
    session.close()

    assert 3900 * MIB == published()[0]["devices"][0]["allocator"]["active_peak_bytes"]


def test_a_failing_release_never_reaches_training(
    card: SimulatedCard, open_session: Opener
) -> None:
    """When emptying the cache raises, the step goes on and the error is counted."""

    class Failing(CountingBackend):
        def empty_cache(self) -> None:
            raise RuntimeError("broken driver")

    backend = Failing([DeviceCachingAllocator(card)])
    session = open_session(backend, interval=1e-9, release=0.3, release_interval=1e-9)
    train(backend, 3900, *[100] * RECENT_WINDOWS)

    assert 1 == session.errors.counts["release"]
