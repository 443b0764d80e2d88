"""Plays a job in virtual time: what the SDK records of it, and what is said of that.

The SDK reads each of the first steps, then about once a second, the step after each such read, and
a step after each hundredth of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from experiments.histories.job import GIB, Job, Step

from torchmem.allocator.oom_cause import OomEvidence
from torchmem.explain.growth import (
    MAX_HORIZON,
    MIN_LIVE_GROWTH_RATIO,
    MIN_LIVE_STEPS,
    live_growth,
    steps_left,
)
from torchmem.explain.verdict import Circumstances, judge
from torchmem.sample.run_history import Growth, RunHistory
from torchmem.sample.sample import Allocator, ByPool, DeviceSample
from torchmem.sdk.reading.run_history import RunHistoryRecorder, next_early_step
from torchmem.sdk.safety.cost import FIRST_STEPS, INTERVAL_SECONDS, SOON_SNAPSHOT_SECONDS

MIB = 1 << 20
PROMPT_STEPS = 60
"""Growth must be reported within this many steps after it is large enough to report."""
FLAT_STEPS = 50
"""A report of growth must be withdrawn within this many steps after the growth ends."""
FAST_SECONDS = 5 * INTERVAL_SECONDS
"""Both limits are at least this long, as the SDK reads and judges about once a second."""
MAX_LENGTH = 2
"""A job that is to die within its planned steps has died within this many times as many."""
LEAK_FOR_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Said:
    """What a judgment says of a rank that runs.

    Attributes:
        step: steps that had ended.
        growth: what grows.
        steps_left: until memory is full; None if nothing is said.
        is_seen: whether the run had long shown its period or its level.
        is_due: whether growth that leads to an OutOfMemoryError has been worth telling.
    """

    step: int
    growth: Growth | None
    steps_left: float | None
    is_seen: bool
    is_due: bool

    @property
    def is_leak(self) -> bool:
        """Whether it is called a leak, which is more than the fact that something grows."""
        return self.growth is not None and self.growth.is_leak


@dataclass(slots=True)
class Played:
    """What was said of a job.

    Attributes:
        job: the job.
        said: the judgments, oldest first.
        worth: the step from which the growth was worth telling; None if it never was.
        deadline: the step by which it had to be told; None if the job ended before.
        alerted: the step in which the alert on a leak first fires; None if it does not.
        alerted_late: the same, after the run had shown its period or its level.
        died: the step that failed; None if none did.
        onset: what is said of the end; None if it is unknown.
    """

    job: Job
    said: list[Said] = field(default_factory=list)
    worth: int | None = None
    deadline: int | None = None
    alerted: int | None = None
    alerted_late: int | None = None
    died: int | None = None
    onset: str | None = None

    @property
    def is_told(self) -> bool | None:
        """Whether growth was reported in time; None without growth, or if the run ended first."""
        if self.worth is None or self.deadline is None:
            return None
        kinds = self.job.pattern.grows
        window = (each for each in self.said if self.worth <= each.step <= (self.deadline or 0))
        return any(each.growth is not None and each.growth.kind in kinds for each in window)


class _Process:
    """The memory of a job, read as the SDK does."""

    def __init__(self, job: Job) -> None:
        draw = job.random
        self.job = job
        self.now = 0.0
        self._base_outside = int(draw.uniform(0.3, 0.6) * GIB)
        self._cached = int(draw.uniform(0.002, 0.01) * job.total)
        self.room = job.total - self._base_outside - self._cached
        self._recorder = RunHistoryRecorder(clock=lambda: self.now)
        self._has_components = job.seed % 2 == 0
        self._next_read = self._next_snapshot = 0.0
        self._next_early = 1
        self._is_watched = False
        self._stranded: int | None = None
        self.before = Step()
        self._peak = 0

    @property
    def history(self) -> RunHistory:
        """What was recorded so far."""
        return self._recorder.published() or RunHistory()

    def lacks(self, step: Step) -> int:
        """Return the bytes by which a step's peak is above what the job can have."""
        need = self.job.model + max(step.kept, self.before.kept) + step.need
        return int(self.room * (need + step.outside + step.stranded - 1))

    def end(self, number: int, step: Step) -> bool:
        """End a step; return whether the SDK has read."""
        job = self.job
        self.now += job.step_seconds * job.random.uniform(0.9, 1.1)
        shares = job.model + max(step.kept, self.before.kept) + step.need
        self._peak = max(self._peak, min(self._bytes(shares), self._most(step)))
        self.before = step
        is_routine = number <= FIRST_STEPS or self.now >= self._next_read
        if not is_routine and not self._is_watched and number < self._next_early:
            return False
        self._next_early = max(self._next_early, next_early_step(number))
        if is_routine or self._is_watched:
            self._read(number, step)
        else:
            self._add(number, step, None)
        self._is_watched = is_routine
        return True

    def _read(self, number: int, step: Step) -> None:
        """Read everything, which is done about once a second."""
        if self.now >= self._next_read:
            self._next_read = self.now + INTERVAL_SECONDS
        if self.now >= self._next_snapshot:
            self._next_snapshot = self.now + SOON_SNAPSHOT_SECONDS
            self._stranded = self._bytes(step.stranded) + self._cached // 2
        parts: dict[str, int] = {}
        if self._has_components:
            model, lingering = self._bytes(self.job.model), step.need * step.lingering
            parts = {"parameters": model // 3, "optimizer_state": model - model // 3}
            parts |= {"held": self._bytes(step.kept), "step": self._bytes(lingering)}
        self._add(number, step, self._base_outside + self._bytes(step.outside), parts)

    def _add(
        self, number: int, step: Step, outside: int | None, parts: dict[str, int] | None = None
    ) -> None:
        own = self.job.model + step.kept + step.need * step.lingering
        allocated = self._bytes(own) + self.job.random.randrange(64) * 512
        self._recorder.add(
            number,
            allocated,
            self._peak,
            stranded=self._stranded,
            outside=outside,
            components=parts,
        )

    def _bytes(self, share: float) -> int:
        return int(share * self.room) // 512 * 512

    def _most(self, step: Step) -> int:
        return int(self.room * (1 - step.outside - step.stranded))

    def left(self, step: Step) -> int:
        """Return the bytes that active memory can still grow by, from its highest peak."""
        outside = self._base_outside + self._bytes(step.outside)
        return max(0, self.job.total - outside - self._peak)

    def device(self, step: Step, growth: Growth | None) -> DeviceSample:
        """Return the sample that is published with a judgment."""
        most = ByPool(0, self.job.total - self._base_outside - self._bytes(step.outside))
        return DeviceSample(
            index=0,
            uuid=None,
            name="",
            total_bytes=self.job.total,
            allocator=Allocator(most, most, most, None, None, self._peak, self._peak, most.total),
            driver_free_bytes=0,
            growth=growth,
            run_history=self.history,
        )

    def fail(self, number: int, step: Step) -> str | None:
        """Return the onset that is said of a request in this step, which is part of its need."""
        draw, most = self.job.random, self._most(step)
        share = draw.uniform(0.3, 0.6) if step.stranded else draw.uniform(0.05, 0.3)
        requested = max(2 * MIB, self._bytes(share * step.need))
        spare = int(requested * max(draw.random(), 1 - self.lacks(step) / requested))
        outside = self._base_outside + self._bytes(step.outside)
        free = min(spare // 2, 20 * MIB)
        evidence = OomEvidence(
            requested=requested,
            limit=self.job.total,
            driver_free=free,
            cached_free=self.job.total - outside - free - (most - spare),
            reserved=self.job.total - outside - free,
            total=self.job.total,
        )
        about = Circumstances(number - 1, most - spare, self.history, is_alone=True)
        why = judge(evidence, None, about).why
        return why.onset if why else None


def play(job: Job) -> Played:
    """Play a job to its end."""
    return _Play(job).played


class _Play:
    def __init__(self, job: Job) -> None:
        self.played = Played(job)
        self._job = job
        self._process = _Process(job)
        self._begin = self._due = 0
        self._unseen = self._worth = _Moment()
        self._pending_since: float | None = None
        for number, step in enumerate(self._steps(), 1):
            if not step.is_caught and self._process.lacks(step) > 0:
                self.played.died, self.played.onset = number, self._process.fail(number, step)
                break
            self._end(number, step)

    def _steps(self) -> Iterator[Step]:
        return islice(self._job.pattern.steps(self._job), MAX_LENGTH * self._job.steps)

    def _end(self, number: int, step: Step) -> None:
        """End a step, and judge if the SDK has read and the judgment is of interest."""
        is_read = self._process.end(number, step)
        if step.grown <= 0:
            self._begin = number
        if not step.is_seen:
            self._unseen = _Moment(number, self._process.now)
        if is_read:
            self._note_worth(number, step)
            if number >= self._due or self._is_pending:
                self._judge(number, step)

    @property
    def _is_pending(self) -> bool:
        return self._pending_since is not None and self.played.alerted is None

    def _note_worth(self, number: int, step: Step) -> None:
        """Note from when on, and until when, growth was to be told."""
        played, now = self.played, self._process.now
        if played.worth is None:
            if self._is_worth(number, step):
                played.worth, self._worth, self._due = number, _Moment(number, now), number
        elif played.deadline is None and self._worth.is_past(number, now, PROMPT_STEPS):
            played.deadline, self._due = number, number

    def _is_worth(self, number: int, step: Step) -> bool:
        grown = step.grown * self._process.room
        pace = grown / max(1, number - self._begin)
        return (
            bool(self._job.pattern.grows)
            and number - self._begin >= MIN_LIVE_STEPS
            and grown >= MIN_LIVE_GROWTH_RATIO * self._job.total
            and self._process.left(step) <= pace * MAX_HORIZON * number
        )

    def _judge(self, number: int, step: Step) -> None:
        process, total = self._process, self._job.total
        growth = live_growth(process.history, total, process.left(step))
        left = steps_left(process.device(step, growth)) if growth else None
        is_seen = step.is_seen and self._unseen.is_past(number, process.now, FLAT_STEPS)
        is_due = self.played.worth is not None
        said = Said(number, growth, left, is_seen, is_due)
        self.played.said.append(said)
        self._due = number + self._pause(number)
        self._note_alert(said)

    def _pause(self, number: int) -> int:
        """Return the steps until the next judgment of interest."""
        steps = self._job.steps
        if not self._job.pattern.onsets:
            return max(1, min(max(4, number // 8), steps // 40))
        is_awaited = self.played.worth is not None and self.played.deadline is None
        return PROMPT_STEPS // 5 if is_awaited else steps // 10

    def _note_alert(self, said: Said) -> None:
        """Fire the alert if a leak is said at every read of 15 seconds, as Prometheus would."""
        now, played = self._process.now, self.played
        if not said.is_leak:
            self._pending_since = None
            return
        self._pending_since = now if self._pending_since is None else self._pending_since
        if now - self._pending_since >= LEAK_FOR_SECONDS:
            played.alerted = played.alerted or said.step
            if said.is_seen:
                played.alerted_late = played.alerted_late or said.step


@dataclass(frozen=True, slots=True)
class _Moment:
    step: int = 0
    at: float = -math.inf

    def is_past(self, step: int, now: float, steps: int) -> bool:
        """Return whether at least `steps` steps and FAST_SECONDS have passed since."""
        return step >= self.step + (steps if self.step else 0) and now >= self.at + FAST_SECONDS
