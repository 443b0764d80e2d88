"""Training steps: what counts as one, how many there were, and the time between them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from time import perf_counter
from weakref import ref

from torchmem.sample.sample import STEP_DURATION_BOUNDS, Steps

# A process without a step for this many of its usual steps, and this many seconds, is late.
LATE_STEPS = 5
MIN_LATE_SECONDS = 1.0


class Iterations:
    """Detects the start of each training iteration when several optimizers step in it.

    An iteration starts when an optimizer that has already stepped in the current one steps again.
    Together, the two optimizers of a GAN therefore count as one iteration, as do the hundreds of
    an optimizer-in-backward. A later phase of training with an optimizer of its own starts one,
    too: its first step if the optimizer before it is gone, else its first two with the second.

    `latest` returns the optimizer of the latest step, if it still exists.
    """

    def __init__(self) -> None:
        # Whether the current iteration began with an optimizer that stepped again.
        self._is_loop = False
        self._stepped: dict[int, Callable[[], object]] = {}
        self.latest: Callable[[], object] = _gone

    def begun(self, optimizer: object) -> int:
        """Return how many iterations this step of an optimizer shows to have begun: 0, 1 or 2.

        Call it for each step, in order. 2 means that the previous step, for which it returned 0,
        began one as well.
        """
        previous = self.latest()
        if previous is not optimizer:
            self.latest = _reference(optimizer)
        repeats = self._stepped.get(id(optimizer), _gone)() is optimizer
        if self._stepped and not repeats and previous is not None:
            self._stepped[id(optimizer)] = self.latest
            return 0
        has_own_loop = self._is_loop and previous is optimizer and len(self._stepped) > 1
        self._stepped, self._is_loop = {id(optimizer): self.latest}, repeats
        return 2 if has_own_loop else 1


def _gone() -> None:
    """Stand for a weak reference to an object that is gone."""


def _reference(optimizer: object) -> Callable[[], object]:
    """Return a weak reference, or a strong one to a number, as simulations have."""
    try:
        return ref(optimizer)
    except TypeError:
        return lambda: optimizer


class StepClock:
    """Counts steps, in the training thread. Times are seconds of `time.perf_counter`.

    `count`: steps so far. `last`: the end of the latest one. `progress`: the latest beginning or
    end of a pass of the loop, or read that found new allocations. After a pass that `waits`, no
    step is expected until the next pass begins. `read_count`: the count at the latest read at a
    step's end.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: float | None = None
        self.progress: float | None = None
        self.waits = False
        self.read_count: int | None = None
        self._allocations = 0
        self._durations = list(Steps().duration_counts)
        self._seconds = 0.0
        self._samples: int | None = None

    def tick(self, now: float, samples: int | None = None) -> None:
        """Count a step that ended at `now` and consumed `samples` training samples."""
        if self.last is not None:
            seconds = now - self.last
            self._durations[bisect_left(STEP_DURATION_BOUNDS, seconds)] += 1
            self._seconds += seconds
        self.count += 1
        self.last = now
        if samples is not None:
            self.add_samples(samples)

    @property
    def has_begun(self) -> bool:
        """Whether a step was counted, or a pass of a loop began."""
        return self.progress is not None or self.last is not None

    def note_progress(self, *, waits: bool) -> None:
        """Note that a pass of the loop began or ended; if it `waits`, no step is expected now."""
        self.progress, self.waits = perf_counter(), waits

    def note_allocations(self, number: int, *, at_step: bool) -> None:
        """Note how many allocations a read found so far: more of them since a step are progress.

        An evaluation allocates for every batch; a rank that waits for data, for a file or for
        another rank does not.
        """
        if number > self._allocations and self.last is not None and not at_step:
            self.progress = perf_counter()
        self._allocations = number

    def add_samples(self, samples: int) -> None:
        """Count training samples, at any time in a step."""
        self._samples = (self._samples or 0) + samples

    def is_late(self, now: float) -> bool:
        """Return whether there has been no step for much longer than usual, or none at all."""
        last = self.last
        if last is None:
            return True
        usual = self._seconds / (self.count - 1) if self.count > 1 else MIN_LATE_SECONDS
        return now - last > max(MIN_LATE_SECONDS, LATE_STEPS * usual)

    def steps(self) -> Steps:
        """Return the counts so far, with the Unix times of the last step and sign of progress.

        Another thread that calls it during a step may see a part of that step.
        """
        return Steps(
            self.count,
            tuple(self._durations),
            self._seconds,
            self._samples,
            _unix_time(self.last),
            _unix_time(self.progress),
            self.read_count,
        )


def _unix_time(moment: float | None) -> float | None:
    return None if moment is None else time.time() - (perf_counter() - moment)
