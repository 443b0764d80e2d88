"""The peak to expect of the largest batch that a script plans."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.sizes import MIB
from torchmem.sdk.reading.plan import MAX_REACH, MIN_POINTS, WARM_UP_READS, PeakBySize, fitted
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend

BASE, PER_TOKEN = 300 * MIB, 1000
Opener = Callable[..., Session]


def after(steps: Iterable[tuple[float, int]]) -> PeakBySize:
    """Return what is known after steps of these sizes and peaks, with a warm-up before them."""
    known, highest = PeakBySize(), 0
    for size, peak in [*[(1.0, 1)] * WARM_UP_READS, *steps]:
        highest = max(highest, peak)
        known.add(size, highest)
    return known


def peak(size: float) -> int:
    """Return the peak of a step whose activations are proportional to the batch."""
    return round(BASE + PER_TOKEN * size)


@given(
    st.lists(st.integers(1_000, 100_000), min_size=20, max_size=60),
    st.floats(1, MAX_REACH),
)
def test_a_line_is_found_or_nothing(sizes: list[int], reach: float) -> None:
    """Where the peaks lie on a line, what is expected is the peak that the largest batch has."""
    largest = reach * max(sizes)
    expected = after((size, peak(size)) for size in sizes).expected(largest)

    assert expected is None or abs(expected - peak(largest)) < MIB


def test_growing_batches_show_the_peak_of_the_largest() -> None:
    """Four sizes in a range of 25 % are enough, up to ten times the largest of them."""
    sizes = [1000, 1100, 1200, 1300]
    assert len(sizes) == MIN_POINTS
    known = after((size, peak(size)) for size in sizes)

    assert peak(4000) == known.expected(4000)
    assert known.expected(1300 * MAX_REACH + 1) is None
    assert after((size, peak(size)) for size in sizes[1:]).expected(4000) is None


def test_batches_of_one_size_show_nothing_of_larger_ones() -> None:
    """Without different sizes there is no line; what has been seen is known."""
    known = after([(1000, peak(1000))] * 50)

    assert known.expected(2000) is None
    assert known.expected(1000) == known.expected(500) == peak(1000)


@pytest.mark.parametrize(
    "peaks",
    [
        pytest.param([500, 500, 500, 500, 500], id="something else has the peak"),
        pytest.param([100, 110, 300, 310, 320], id="a leap"),
        pytest.param([500, 400, 300, 200, 100], id="smaller batches with higher peaks"),
    ],
)
def test_peaks_that_do_not_follow_the_batch_show_nothing(peaks: list[int]) -> None:
    """Peaks that are not close to a rising line are not extrapolated."""
    sizes = [1000, 1200, 1400, 1600, 1800]

    assert fitted([(size, value * MIB) for size, value in zip(sizes, peaks, strict=True)]) is None


def test_a_model_that_has_grown_is_seen_by_its_newest_batches() -> None:
    """Points before a leap, such as the state of a second optimizer, are left out of the line."""
    sizes = [1000, 1100, 1200, 1300, 1400, 1500, 1600, 1700, 1800]
    leap = 500 * MIB
    known = after((size, peak(size) + (leap if size > 1300 else 0)) for size in sizes)

    assert peak(3000) + leap == known.expected(3000)


def test_the_line_is_above_its_points() -> None:
    """Peaks that vary are extrapolated from the highest of them."""
    noise = [0, 20, -10, 15, 0, -20]
    points = [(1000.0 + 200 * n, peak(1000 + 200 * n) + 1000 * noise[n]) for n in range(6)]
    line = fitted(points)

    assert line is not None
    assert all(line[0] + line[1] * size >= value - 1 for size, value in points)


def run(
    session: Session,
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    tell: Callable[[int], Any],
) -> int | None:
    """Run steps on longer and longer batches; return the peak to expect that is published."""
    allocator.malloc(BASE)
    for size in (100, 100, 100, 110, 120, 130, 140, 150):
        tell(size)
        allocator.free(allocator.malloc(size * MIB))
        time.sleep(0.002)
        backend.step()
    session.close()
    assert session.newest is not None
    return session.newest.devices[0].planned_peak_bytes


@pytest.mark.parametrize("plan", [300, 300.0, None])
def test_a_plan_shows_what_its_largest_batch_needs(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    plan: float | None,
) -> None:
    """With `plan` and `batch` the peak to expect is published; without a plan it is absent."""
    session = open_session(backend, interval=1e-4)
    session.plan(plan)

    found = run(session, backend, allocator, session.batch)

    assert (None if plan is None else BASE + 300 * MIB) == found


def test_batches_tell_their_own_size(
    backend: SimulatedBackend, allocator: DeviceCachingAllocator, open_session: Opener
) -> None:
    """In `batches` the size of a batch is the number of elements of its first tensor."""
    session = open_session(backend, interval=1e-4)
    session.plan(600)

    def tell(size: int) -> None:
        next(session.batches([{"tokens": Shaped(2, size), "mask": Shaped(7)}]))

    assert run(session, backend, allocator, tell) == BASE + 300 * MIB


class Shaped:
    """A tensor on a device, whose comparison would wait for the device."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __lt__(self, other: object) -> bool:
        raise AssertionError("compared")

    __gt__ = __le__ = __ge__ = __lt__


@pytest.mark.parametrize("size", [Shaped(), "large", -1, 0, float("nan"), float("inf"), None])
def test_what_is_no_size_is_ignored_with_one_warning(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    size: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A tensor, a string or an impossible number is logged once and changes nothing."""
    session = open_session(backend, interval=1e-4)
    session.plan(300)

    def tell(told: int) -> None:
        session.batch(told)
        session.batch(size)

    with caplog.at_level(logging.WARNING, "torchmem"):
        if size is not None:
            session.plan(size)
        found = run(session, backend, allocator, tell)

    assert found == BASE + 300 * MIB
    assert caplog.text.count("the size of a batch is ignored") == 1
