"""Training steps: what counts as one, how many there were, and the time between them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from weakref import ref

from torchmem.sample.sample import STEP_DURATION_BOUNDS, Steps
from torchmem.sdk.safety.cost import MAX_STEP_SECONDS

# A process without a step for this many of its usual steps, and this many seconds, is late.
LATE_STEPS = 5
MIN_LATE_SECONDS = 1.0


class Iterations:
    """Detects the start of each training iteration when several optimizers step in it.

    An iteration starts when an optimizer that has already stepped in the current one steps again.
    Together, the two optimizers of a GAN therefore count as one iteration, as do the hundreds of
    an optimizer-in-backward. A later phase of training with an optimizer of its own starts one,
    too: its first step if the optimizer before it is gone, else its first two with the second.

    `is_loop`: whether the current iteration began with an optimizer that stepped again.
    """

    def __init__(self) -> None:
        self.is_loop = False
        self._stepped: dict[int, Callable[[], object]] = {}
        self._latest: Callable[[], object] = nothing

    def begun(self, optimizer: object) -> int:
        """Return how many iterations this step of an optimizer shows to have begun: 0, 1 or 2.

        Call it for each step, in order; while only one optimizer steps in a loop, it may be left
        out. 2 means that the previous step, for which it returned 0, began one as well.
        """
        previous, self._latest = self._latest(), _reference(optimizer)
        repeats = self._stepped.get(id(optimizer), nothing)() is optimizer
        if self._stepped and not repeats and previous is not None:
            self._stepped[id(optimizer)] = self._latest
            return 0
        has_own_loop = self.is_loop and previous is optimizer and len(self._stepped) > 1
        self._stepped, self.is_loop = {id(optimizer): self._latest}, repeats
        return 2 if has_own_loop else 1


def nothing() -> None:
    """Stand for a reference to an object that is gone."""


def _reference(optimizer: object) -> Callable[[], object]:
    """Return a weak reference, or a strong one to a number, as simulations have."""
    try:
        return ref(optimizer)
    except TypeError:
        return lambda: optimizer


@dataclass(frozen=True, slots=True)
class _Counted:
    """The steps up to one moment, with the fields of `Steps`; `last` by `time.perf_counter`."""

    count: int = 0
    last: float | None = None
    durations: tuple[int, ...] = Steps().duration_counts
    seconds: float = 0.0

    def with_ends(self, ends: Sequence[float]) -> _Counted:
        """Count steps that ended at these times."""
        if not ends:
            return self
        durations, last = list(self.durations), ends[0] if self.last is None else self.last
        skipped = int(self.last is None)  # the first step has no earlier end
        for earlier, later in pairwise((last, *ends[skipped:])):
            durations[bisect_left(STEP_DURATION_BOUNDS, later - earlier)] += 1
        return _Counted(
            self.count + len(ends), ends[-1], tuple(durations), self.seconds + ends[-1] - last
        )


class StepClock:
    """Counts steps. Times are seconds of `time.perf_counter`.

    A step that ends before `quiet_until` needs nothing but a call of `note` with the time of its
    end, a method of a list, because most steps come with cold caches. The training thread counts
    what was noted at a full step, and other threads only look at it. The first such step after a
    full one is timed, because a second look at the clock would cost each of them a third more.

    `progress` is the latest beginning or end of a pass of the loop. After a pass that `waits`, no
    step is expected until the next pass begins. `read_count`: the count at the latest read at a
    step's end.
    """

    def __init__(self) -> None:
        self.quiet_until = 0.0
        self.progress: float | None = None
        self.waits = False
        self.read_count: int | None = None
        self._samples: int | None = None
        self._state: tuple[_Counted, list[float]] = _Counted(), []
        # What was counted of that list, up to an index, so that each end is counted once.
        self._partial: tuple[list[float], int, _Counted] = [], 0, _Counted()
        self._noted_seconds = 0.0
        self.note: Callable[[float], None] = self._note_and_time

    def require_full_step(self) -> None:
        """Let the next step be a full one; in any thread."""
        self.quiet_until = 0.0

    def _note_and_time(self, now: float) -> None:
        spent = perf_counter() - now  # this call costs as much as the rest of a noted step
        self.note = self._state[1].append
        self.note(now)
        self._noted_seconds = min(MAX_STEP_SECONDS, spent)

    def collect(self) -> float:
        """Count the steps that were noted, in the training thread; return what they cost."""
        spent = len(self._state[1]) * self._noted_seconds
        # One assignment, because another thread may read at any time.
        self._state = self._counted(), []
        self.note = self._note_and_time
        return spent

    def tick(self, now: float, samples: int | None = None) -> None:
        """Count a step that ended at `now` and consumed `samples` training samples."""
        self._state[1].append(now)
        if samples is not None:
            self.add_samples(samples)

    @property
    def count(self) -> int:
        """Steps so far."""
        counted, ends = self._state
        return counted.count + len(ends)

    @property
    def has_begun(self) -> bool:
        """Whether a step was counted, or a pass of a loop began."""
        return self.progress is not None or self.last is not None

    @property
    def last(self) -> float | None:
        """The end of the latest step."""
        counted, ends = self._state
        return ends[-1] if ends else counted.last

    def _counted(self) -> _Counted:
        """Return all steps so far; in any thread."""
        counted, ends = self._state
        of, start, partial = self._partial
        if of is not ends:
            start, partial = 0, counted
        known = len(ends)
        partial = partial.with_ends(ends[start:known])
        self._partial = ends, known, partial
        return partial

    def note_progress(self, *, waits: bool) -> None:
        """Note that a pass of the loop began or ended; if it `waits`, no step is expected now."""
        self.progress, self.waits = perf_counter(), waits

    def add_samples(self, samples: int) -> None:
        """Count training samples, at any time in a step."""
        self._samples = (self._samples or 0) + samples

    def is_late(self, now: float) -> bool:
        """Return whether there has been no step for much longer than usual, or none at all."""
        last = self.last
        if last is None:
            return True
        if now - last <= MIN_LATE_SECONDS:
            return False
        counted = self._counted()
        usual = counted.seconds / (counted.count - 1) if counted.count > 1 else MIN_LATE_SECONDS
        return now - last > max(MIN_LATE_SECONDS, LATE_STEPS * usual)

    def steps(self) -> Steps:
        """Return the counts so far, with the Unix times of the last step and sign of progress."""
        counted = self._counted()
        last, progress = _unix_time(counted.last), _unix_time(self.progress)
        return Steps(
            counted.count,
            counted.durations,
            counted.seconds,
            self._samples,
            last,
            progress,
            self.read_count,
        )


def _unix_time(moment: float | None) -> float | None:
    return None if moment is None else time.time() - (perf_counter() - moment)
