"""How busy a simulated GPU was over time, and what follows from that with a delay."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator

MAX_CHANGES = 512
"""Changes that are remembered. Older ones only count in `Activity.worked`."""


class Activity:
    """The share of time in which a GPU runs kernels: a step function of the time in seconds.

    It is 0 before the first change. Values at a time depend only on the changes up to then.
    """

    def __init__(self, changes: Iterable[tuple[float, float]] = ()) -> None:
        self._times = [-math.inf]
        self._levels = [0.0]
        self._worked_before = 0.0
        for at, level in changes:
            self.change(at, level)

    def change(self, at: float, level: float) -> None:
        """Set the level, from 0 to 1, from the time `at` on. Raise ValueError if it is earlier."""
        if at < self._times[-1]:
            raise ValueError(f"the activity at {at:g} s is later than its newest change")
        if level == self._levels[-1]:
            return
        self._times.append(at)
        self._levels.append(level)
        if len(self._times) > MAX_CHANGES:
            self._forget_first()

    def level(self, at: float) -> float:
        """Return the level at a time."""
        return self._levels[bisect_right(self._times, at) - 1]

    def smoothed(self, at: float, seconds: float) -> float:
        """Return what follows the level with the time constant `seconds`, as heat follows power."""
        value = self._levels[0]
        for duration, level in self._spans(at):
            value = level + (value - level) * math.exp(-duration / seconds)
        return value

    def worked(self, at: float) -> float:
        """Return the seconds of work up to a time: the integral of the level."""
        return self._worked_before + sum(
            duration * level for duration, level in self._spans(at) if level
        )

    def _spans(self, at: float) -> Iterator[tuple[float, float]]:
        """Yield the duration and the level of each step up to a time."""
        ends = [*self._times[1:], math.inf]
        for start, end, level in zip(self._times, ends, self._levels, strict=True):
            if start < at:
                yield min(end, at) - start, level

    def _forget_first(self) -> None:
        if self._levels[0]:
            self._worked_before += self._levels[0] * (self._times[1] - self._times[0])
        del self._times[0], self._levels[0]
