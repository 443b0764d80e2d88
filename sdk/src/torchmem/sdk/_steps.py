"""Optimizer steps: their number and the time between them."""

from __future__ import annotations

from bisect import bisect_left

from torchmem.core.sample import STEP_DURATION_BOUNDS, Steps


class StepClock:
    """Counts steps; a call costs about a microsecond. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.count = 0
        self.last: float | None = None
        self._samples: int | None = None
        self._durations = [0] * (len(STEP_DURATION_BOUNDS) + 1)
        self._sum = 0.0

    def tick(self, now: float, samples: int | None = None) -> None:
        """One step ended at `now`, having consumed `samples` training samples."""
        if self.last is not None:
            duration = now - self.last
            self._durations[bisect_left(STEP_DURATION_BOUNDS, duration)] += 1
            self._sum += duration
        self.last = now
        self.count += 1
        if samples is not None:
            self._samples = (self._samples or 0) + samples

    def steps(self) -> Steps:
        """The counts so far."""
        return Steps(self.count, tuple(self._durations), self._sum, self._samples)
