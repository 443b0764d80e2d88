"""Training steps: what counts as one, how many there were, and the time between them."""

from __future__ import annotations

import time
from bisect import bisect_left

from torchmem.sample.sample import STEP_DURATION_BOUNDS, Steps

# A process without a step for this many of its usual steps, and this many seconds, is late.
LATE_STEPS = 5
MIN_LATE_SECONDS = 1.0


class Iterations:
    """Detects the start of each training iteration when several optimizers step in it.

    An iteration starts when an optimizer that has already stepped in the current one steps again.
    Together, the two optimizers of a GAN therefore count as one iteration, as do the hundreds of
    an optimizer-in-backward.
    """

    def __init__(self) -> None:
        self._stepped: set[int] = set()

    def begins(self, optimizer: int) -> bool:
        """Return whether the step of this optimizer, identified by a number, starts an iteration.

        Call it once for each step, in order.
        """
        if self._stepped and optimizer not in self._stepped:
            self._stepped.add(optimizer)
            return False
        self._stepped = {optimizer}
        return True


class StepClock:
    """Counts steps in about a microsecond each. Times are seconds of `time.perf_counter`.

    `progress` is the latest beginning or end of a pass of the loop. After a pass that `waits`, no
    step is expected until the next pass begins. `read_count`: the count at the latest read at a
    step's end.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: float | None = None
        self.progress: float | None = None
        self.waits = False
        self.read_count: int | None = None
        self._samples: int | None = None
        self._durations = [0] * (len(STEP_DURATION_BOUNDS) + 1)
        self._sum = 0.0

    def tick(self, now: float, samples: int | None = None) -> None:
        """Count a step that ended at `now` and consumed `samples` training samples."""
        if self.last is not None:
            duration = now - self.last
            self._durations[bisect_left(STEP_DURATION_BOUNDS, duration)] += 1
            self._sum += duration
        self.last = now
        self.count += 1
        if samples is not None:
            self.add_samples(samples)

    def note_progress(self, *, waits: bool) -> None:
        """Note that a pass of the loop began or ended; if it `waits`, no step is expected now."""
        self.progress, self.waits = time.perf_counter(), waits

    def add_samples(self, samples: int) -> None:
        """Count training samples, at any time in a step."""
        self._samples = (self._samples or 0) + samples

    def is_late(self, now: float) -> bool:
        """Return whether there has been no step for much longer than usual, or none at all."""
        if self.last is None:
            return True
        usual = self._sum / (self.count - 1) if self.count > 1 else MIN_LATE_SECONDS
        return now - self.last > max(MIN_LATE_SECONDS, LATE_STEPS * usual)

    def steps(self) -> Steps:
        """Return the counts so far, with the Unix times of the last step and sign of progress."""
        last, progress = _unix_time(self.last), _unix_time(self.progress)
        return Steps(
            self.count,
            tuple(self._durations),
            self._sum,
            self._samples,
            last,
            progress,
            self.read_count,
        )


def _unix_time(moment: float | None) -> float | None:
    return None if moment is None else time.time() - (time.perf_counter() - moment)
