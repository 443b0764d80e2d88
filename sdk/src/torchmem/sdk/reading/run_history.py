"""Keeps the history of the whole run on one device in a bounded number of points."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torchmem.sample.run_history import MAX_POINTS, NEWEST_POINTS, RunHistory
from torchmem.sample.sample import Component

EARLY_STEPS = 100
"""The first steps, each of which is read: a job may end in its first seconds. After so many more,
a hundredth of the steps is left out between two reads, however fast the steps are."""
FIRST_POINTS = 4
"""The first points, all of which are kept: they show what the first steps needed."""
SETTLED_STEPS = 3
"""Steps after which the first components are kept: the optimizer's state is there by then."""

_OF_A_STEP: frozenset[Component] = frozenset({"step", "gradients_or_step", "pending"})
"""Components that are not kept between steps."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is known at one step's end, see `RunHistory`."""

    steps: int
    seconds: float
    allocated: int
    peak: int
    stranded: int | None
    outside: int | None
    kept: int | None = None


def next_early_step(step: int) -> int:
    """Return the step whose end is read after this one's, even if little time has passed."""
    return step + max(1, step // EARLY_STEPS)


def kept_between_steps(components: dict[str, int]) -> dict[str, int]:
    """Return the components at a step's end, except those that are not kept between steps."""
    return {name: size for name, size in components.items() if name not in _OF_A_STEP}


class RunHistoryRecorder:
    """Keeps the newest points, and before them points that are spread evenly over the run.

    Even in steps, or in time without steps, because the first steps are read more often. Used in
    the training thread and in the sampler's, which may read at any time: each change is one
    assignment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started: float | None = None
        self._points: list[Point] = []
        self._first_components: dict[str, int] = {}
        self._last_components: dict[str, int] = {}
        self._published: RunHistory | None = None

    def add(  # noqa: PLR0913 - one point
        self,
        steps: int,
        allocated: int,
        peak: int,
        *,
        stranded: int | None = None,
        outside: int | None = None,
        components: dict[str, int] | None = None,
    ) -> None:
        """Take a point at a step's end, with the components if they were read.

        `outside` is the latest known one if it was not read.
        """
        now = self._clock()
        self._started = now if self._started is None else self._started
        if outside is None and self._points:
            outside = self._points[-1].outside
        seconds, kept = round(now - self._started, 3), None
        if components:
            parts = kept_between_steps(components)
            kept = sum(parts.values())
            if steps <= SETTLED_STEPS or not self._first_components:
                self._first_components = parts
            self._last_components = parts
        point = Point(steps, seconds, allocated, peak, stranded, outside, kept)
        # Between two steps, a later read belongs to the same step: its point replaces the earlier.
        is_again = bool(self._points and steps and self._points[-1].steps == steps)
        points = [*(self._points[:-1] if is_again else self._points), point]
        if len(points) > MAX_POINTS:
            points = [*_spread(points[:-NEWEST_POINTS]), *points[-NEWEST_POINTS:]]
        self._points = points
        self._published = None

    @property
    def newest(self) -> Point | None:
        """The latest point."""
        return self._points[-1] if self._points else None

    def published(self) -> RunHistory | None:
        """Return the history so far; None before the first point."""
        if self._published is None and self._points:
            points = tuple(self._points)
            self._published = RunHistory(
                steps=tuple(point.steps for point in points),
                seconds=tuple(point.seconds for point in points),
                allocated_bytes=tuple(point.allocated for point in points),
                peak_bytes=tuple(point.peak for point in points),
                stranded_bytes=tuple(point.stranded for point in points),
                outside_bytes=tuple(point.outside for point in points),
                kept_bytes=tuple(point.kept for point in points),
                first_components=self._first_components,
                last_components=self._last_components,
            )
        return self._published


def _spread(points: list[Point]) -> list[Point]:
    """Return the points without one: after the first ones, that with the closest neighbors."""
    places = [point.steps or point.seconds for point in points[FIRST_POINTS - 1 :]]
    gaps = [after - before for before, after in zip(places, places[2:], strict=False)]
    # Where the neighbors are closest, the point that is left out is missed least.
    closest = gaps.index(min(gaps)) + FIRST_POINTS
    return points[:closest] + points[closest + 1 :]
