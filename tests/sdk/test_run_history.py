"""The history of a whole run in a bounded number of points."""

from __future__ import annotations

import sys
from itertools import count, pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.sample.run_history import MAX_POINTS, NEWEST_POINTS, RunHistory
from torchmem.sdk.reading.run_history import FIRST_POINTS, RunHistoryRecorder


def _recorded(number: int) -> RunHistory:
    """Return the history of a run that keeps one byte more after each step, a second each."""
    clock = count()
    recorder = RunHistoryRecorder(lambda: float(next(clock)))
    for step in range(1, number + 1):
        recorder.add(step, allocated=step, peak=2 * step)
    history = recorder.published()
    assert history is not None
    return history


@given(st.integers(1, 5_000))
def test_it_spans_the_run(number: int) -> None:
    """The first and the latest step are there, points are few, and each one is a step's own."""
    history = _recorded(number)

    assert history.is_consistent
    assert (1, number) == (history.steps[0], history.steps[-1])
    assert history.steps == history.allocated_bytes
    assert tuple(2 * step for step in history.steps) == history.peak_bytes
    assert len(history.steps) >= min(number, MAX_POINTS // 2)


def test_the_points_of_a_long_run_are_even() -> None:
    """No two neighbors of a long run are much farther apart than others, up to the newest ones."""
    spread = _recorded(100_000).steps[FIRST_POINTS : MAX_POINTS - NEWEST_POINTS - 1]
    gaps = [high - low for low, high in pairwise(spread)]

    assert max(gaps) <= 5 * min(gaps)


def test_the_newest_points_are_all_there() -> None:
    """What has begun lately is not lost between two points that are far apart."""
    newest = _recorded(100_000).steps[-NEWEST_POINTS:]

    assert newest == tuple(range(100_001 - NEWEST_POINTS, 100_001))


def test_no_point_is_no_history() -> None:
    """Before the first point, the history is unknown."""
    assert RunHistoryRecorder().published() is None


def test_the_first_components_are_those_after_the_first_steps() -> None:
    """Components of the first steps are replaced, later ones are the last; a step's own is left."""
    recorder = RunHistoryRecorder()
    recorder.add(1, 10, 10, components={"held": 1, "step": 9})
    recorder.add(2, 10, 10, components={"held": 2, "optimizer_state": 5})
    recorder.add(50, 20, 20, components={"held": 7, "optimizer_state": 5})
    recorder.add(51, 20, 20, components={})
    history = recorder.published()

    assert history is not None
    assert history.first_components == {"held": 2, "optimizer_state": 5}
    assert history.last_components == {"held": 7, "optimizer_state": 5}
    assert history.kept_bytes == (1, 7, 12, None)


@pytest.mark.parametrize("at", range(20))
def test_the_other_thread_may_read_at_any_time(at: int) -> None:
    """Between any two lines of `add`, the published history is consistent."""
    recorder, seen, events = RunHistoryRecorder(), list[bool](), count()

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if next(events) == at:
            sys.settrace(None)
            history = recorder.published()
            seen.append(history is None or history.is_consistent)
        return look

    for steps in range(1, 200):
        events = count()
        sys.settrace(look)
        recorder.add(steps, steps, steps)
        sys.settrace(None)

    assert all(seen)
    assert seen or at > 10
