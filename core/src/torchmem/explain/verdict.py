"""The verdict on an OutOfMemoryError: what would have made room for it, and what had changed.

The *cause* is the change that would have made the most room, or capacity if no change would have
made enough. The *onset* is the change since the run was healthy without which the failed request
would have succeeded. docs/verdict.md defines both, and shows how often they are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from torchmem.allocator.oom_cause import (
    LargestFreeBlocks,
    OomEvidence,
    fragmentation_detail,
)
from torchmem.explain.growth import (
    JUDGED_ONCE,
    WARM_UP_STEPS,
    growth_of_steps,
    judge_growth,
    kept_points,
    lasting_jump,
    outside_points,
    peak_points,
)
from torchmem.sample.run_history import Growth, RunHistory
from torchmem.sample.sample import Onset, OomCause, OomDetail

Change = Literal["compaction", "limit", "neighbors", "waiting", "cache"]

CAUSE_BY_CHANGE: dict[Change, OomCause] = {
    "waiting": "pending",
    "compaction": "fragmentation",
    "limit": "limit",
    "neighbors": "external",
    "cache": "library",
}

MIN_STEPS_SHARE = 0.1
"""Where memory grows, room matters if it lasts for this share of the steps done."""
NEW_RATIO = 0.1
"""A share of the GPU: what runs for the first time does not show what it still needed."""
MIN_ROOM_RATIO = 0.01
"""Less room than this share of the GPU never matters."""
REQUESTS = 2
"""Room for fewer requests like the failed one does not matter, as a step makes many."""
FIRST_PEAKS = 3
"""The first steps after the warm-up, whose needs are compared with the highest one."""
MAX_FIRST_TURNOVER = 8
"""A first step frees less than this many times the memory in use; what has freed more repeats."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What a change would have freed beyond the failed request.

    Attributes:
        change: compaction of PyTorch's own memory, a higher memory limit, the memory of other
            processes, waiting for other streams, or the release of the cache for a library.
        bytes: room beyond the failed request.
        steps: further steps in that room, where memory grows.
        matters: whether that is enough to matter.
    """

    change: Change
    bytes: int
    steps: float | None
    matters: bool


@dataclass(frozen=True, slots=True)
class OnsetEvidence:
    """Why memory ran out now; numbers that are unknown or meaningless here are None.

    Attributes:
        onset: what had changed.
        bytes: the growth over the run, or how much more this step needed than others.
        bytes_per_step: the growth in each step.
        since_step: steps that had ended when it began.
        component: the component that grew.
        phase: the phase in which it happened.
    """

    onset: Onset
    bytes: int | None = None
    bytes_per_step: float | None = None
    since_step: int | None = None
    component: str | None = None
    phase: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause, its kind, the onset, and what each change would have freed."""

    cause: OomCause
    detail: OomDetail | None
    why: OnsetEvidence | None
    gains: tuple[Gain, ...] = ()

    @property
    def material(self) -> tuple[Gain, ...]:
        """The changes that matter, the one that frees the most first."""
        return tuple(sorted((g for g in self.gains if g.matters), key=lambda g: -g.bytes))


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What was known of the run when the request failed.

    Attributes:
        steps: steps that had ended.
        active: active bytes.
        history: the history of the run; None if it is unknown.
        phase: the evaluation, generation or other part of the program that is not a training step.
        is_new_phase: whether that part had never ended before.
        is_training: whether the failed request belongs to training, which steps follow.
        freed: bytes of tensors that the process has freed so far.
        is_alone: whether this is the only process of its job.
        garbage: bytes that were in reference cycles; None if unknown.
    """

    steps: int = 0
    active: int | None = None
    history: RunHistory | None = None
    phase: str | None = None
    is_new_phase: bool = True
    is_training: bool = True
    freed: int | None = None
    is_alone: bool = False
    garbage: int | None = None


def judge(
    evidence: OomEvidence, blocks: LargestFreeBlocks | None, circumstances: Circumstances
) -> Verdict:
    """Return the verdict; `blocks` is None without a snapshot."""
    if evidence.is_refused:
        return Verdict("limit", "driver", None)
    run = _Run(evidence, circumstances)
    why = run.why()
    gains = tuple(_gains(evidence, blocks, run, why))
    best = max((gain for gain in gains if gain.matters), key=_rank, default=None)
    cause = CAUSE_BY_CHANGE[best.change] if best else "capacity"
    if why is not None and why.onset == "stranded" and cause in {"capacity", "pending"}:
        # Compaction would not have made enough room, or the free memory waited for a stream.
        why = run.why(is_compact=True)
    detail = fragmentation_detail(evidence, blocks) if blocks and cause == "fragmentation" else None
    return Verdict(cause, detail, why, gains)


def judge_library(
    evidence: OomEvidence, cached: int | None, circumstances: Circumstances
) -> Verdict:
    """Return the verdict on a failed allocation of a library other than PyTorch.

    `cached` are the bytes that PyTorch could have released for it, None if they are unknown.
    """
    run = _Run(evidence, circumstances)
    why = run.why()
    spare = None if cached is None else evidence.driver_free + cached - evidence.requested
    if spare is None or spare < 0:
        return Verdict("library", None, why)
    matters = cached is not None and cached >= run.margin(why)
    return Verdict("library", None, why, (Gain("cache", spare, None, matters),))


def judge_wake_up(
    evidence: OomEvidence, cached: int | None, circumstances: Circumstances
) -> Verdict:
    """Return the verdict on an inference engine that could not wake up.

    `evidence.requested` is what it was still to take, and `evidence.reserved` leaves out what
    sleeps. `cached` is as for `judge_library`. Nothing follows the wake-up, so any room that is
    enough for it matters.
    """
    others = _Run(evidence, circumstances).foreign_at_least
    rooms: dict[Change, int] = {"neighbors": others, "cache": cached or 0}
    spare = {name: evidence.driver_free + room - evidence.requested for name, room in rooms.items()}
    gains = tuple(
        Gain(name, spare[name], None, True) for name in rooms if rooms[name] and spare[name] >= 0
    )
    best = max(gains, key=_rank, default=None)
    return Verdict(CAUSE_BY_CHANGE[best.change] if best else "capacity", None, None, gains)


def _rank(gain: Gain) -> tuple[bool, int]:
    """Waiting would have served the request unchanged, so it comes first."""
    return gain.change == "waiting", gain.bytes


def _gains(
    evidence: OomEvidence, blocks: LargestFreeBlocks | None, run: _Run, why: OnsetEvidence | None
) -> Iterator[Gain]:
    margin, per_step = run.margin(why), why.bytes_per_step if why else None
    for change, room in rooms(evidence, blocks, run.foreign):
        spare = room - evidence.requested
        if spare >= 0:
            steps = spare / per_step if per_step else None
            yield Gain(change, spare, steps, change == "waiting" or spare >= margin)


def rooms(
    evidence: OomEvidence, blocks: LargestFreeBlocks | None, foreign: int
) -> Iterator[tuple[Change, int]]:
    """Yield the room that each change makes for one request; `foreign` is what others hold."""
    if blocks is not None and blocks.own >= evidence.needed:
        yield "waiting", max(blocks.own, evidence.requested)
    free = evidence.cached_free + evidence.private_free
    yield "compaction", max(0, evidence.obtainable) + free
    if evidence.total is not None and evidence.limit < evidence.total:
        yield "limit", evidence.driver_free
    if foreign > 0:
        yield "neighbors", evidence.obtainable_of(evidence.driver_free + foreign)


class _Run:
    """The run before the failed request, and with it."""

    def __init__(self, evidence: OomEvidence, circumstances: Circumstances) -> None:
        self._evidence = evidence
        self._about = circumstances
        self._history = circumstances.history or RunHistory()
        self._total = evidence.total or evidence.limit
        self._kept = kept_points(self._history)
        self._peaks = peak_points(self._history)
        self._steps = circumstances.steps
        active = circumstances.active
        self._needed = None if active is None else active + evidence.requested

    @property
    def foreign(self) -> int:
        """The least memory that others may hold, without this process's own outside memory.

        If others took memory that a step needed and had before, that memory counts too.
        """
        least = self.foreign_at_least
        return max(least, self._taken_outside or 0) if self._surprise == 0 else least

    @property
    def foreign_at_least(self) -> int:
        """The least memory that others may hold, by this moment alone."""
        return self._evidence.foreign(self._outside_at_start, is_alone=self._about.is_alone)

    @property
    def _outside_at_start(self) -> int | None:
        known = [size for size in self._history.outside_bytes if size is not None]
        return known[0] if known else None

    def margin(self, why: OnsetEvidence | None) -> float:
        """Return the least room beyond the request that matters."""
        least = MIN_ROOM_RATIO * self._total
        if why is not None and why.bytes_per_step and why.onset in {"leak", "larger_step"}:
            return max(least, MIN_STEPS_SHARE * self._steps * why.bytes_per_step)
        if why is None or why.onset in {"first_step", "new_phase"}:
            return max(least, NEW_RATIO * self._total)
        if why.onset == "outside" and self._surprise == 0:
            return least  # what was enough before is enough
        requests = min(REQUESTS * self._evidence.requested, NEW_RATIO * self._total)
        # What was also needed before does not depend on how much steps differ.
        variation = 0.0 if why.onset in {"stranded", "larger_step"} else self._variation
        return max(least, variation, requests, self._still_needed - self._evidence.requested)

    @property
    def _still_needed(self) -> int:
        """What the failed step still needed, with the request, by what earlier steps needed."""
        requested, active = self._evidence.requested, self._about.active
        if active is None or not self._kept:
            return requested
        needs = (peak - kept for (_, peak), (_, kept) in zip(self._peaks, self._kept, strict=True))
        taken = active - self._kept[-1][1]
        return max(requested, int(min(needs) - max(0, taken)))

    def _succeeds_without(self, added: int) -> bool:
        """Return whether the request, and the rest of its step, would have found room."""
        free = self._evidence.cached_free + self._evidence.private_free
        return self._evidence.obtainable + free + added >= self._still_needed

    @property
    def _variation(self) -> float:
        """How much the peaks of steps differ: the highest above those of the first steps."""
        peaks = [size for _, size in self._peaks]
        return max(peaks) - median(peaks[:FIRST_PEAKS]) if peaks else 0.0

    def why(self, *, is_compact: bool = False) -> OnsetEvidence | None:
        """Return the onset, None if it is unknown. `is_compact`: ignore stranded memory."""
        found = self._without_garbage(is_compact=is_compact)
        return self._garbage(found) or found

    def _garbage(self, other: OnsetEvidence | None) -> OnsetEvidence | None:
        """Return garbage if it explains the OOM, unless another change is larger.

        What was kept or needed contains the garbage. It counts without what was stranded beside it.
        """
        garbage = self._about.garbage or 0
        is_enough = self._evidence.obtainable + garbage >= self._evidence.requested
        if not garbage or not is_enough or not self._succeeds_without(garbage):
            return None
        rest = (other and other.bytes) or 0
        if other and other.onset in {"leak", "larger_step", "new_phase"}:
            rest -= garbage
        return OnsetEvidence("garbage", garbage) if garbage >= rest else None

    def _without_garbage(self, *, is_compact: bool) -> OnsetEvidence | None:
        if self._steps < WARM_UP_STEPS:
            is_first = self._about.is_training and not self._is_repeated
            return OnsetEvidence("first_step") if is_first else None
        if not self._peaks or self._needed is None:
            return self._in_phase()
        growth, appeared = self._growth_of_steps(), self._appeared()
        if growth and appeared and self._explains(growth) and _is_before(appeared, growth):
            appeared = None  # the run was healthy with it
        changes = (
            growth,
            self._outside(),
            self._in_phase(),
            appeared,
            self._larger_step(),
            None if is_compact else self._stranded(),
        )
        found = [each for each in changes if each and self._explains(each)]
        unchanged = OnsetEvidence("tight", self._surprise or None)
        return max(found, key=lambda why: why.bytes or 0, default=unchanged)

    @property
    def _is_repeated(self) -> bool:
        """Whether so much was freed that the program repeats something, without known steps."""
        freed, active = self._about.freed, self._about.active
        return freed is not None and active is not None and freed > MAX_FIRST_TURNOVER * active

    def _explains(self, change: OnsetEvidence) -> bool:
        """Return whether the request would have succeeded without a change.

        A phase that had never ended before made the request itself.
        """
        return change.phase is not None or self._succeeds_without(change.bytes or 0)

    def _in_phase(self) -> OnsetEvidence | None:
        if self._about.phase is None or not self._about.is_new_phase:
            return None
        return OnsetEvidence("new_phase", phase=self._about.phase, bytes=self._surprise)

    def _growth_of_steps(self) -> OnsetEvidence | None:
        """Return the growth until the OOM, unless it was freed before."""
        growth = growth_of_steps(self._history, JUDGED_ONCE)
        if growth is None or self._is_gone(growth):
            return None
        unread, rate = max(0, self._steps - self._history.steps[-1]), growth.bytes_per_step
        grown = int(growth.grown_bytes + rate * unread)
        if growth.kind == "larger_step":
            grown += self._surprise or 0
        return OnsetEvidence(growth.onset, grown, rate, growth.since_step, growth.component)

    def _is_gone(self, growth: Growth) -> bool:
        active, kept = self._about.active, self._kept[-1][1]
        is_freed = active is not None and active < kept - growth.grown_bytes / 2
        return growth.kind == "kept" and is_freed

    def _outside(self) -> OnsetEvidence | None:
        """Return the growth outside the allocator, steady or not."""
        grown = self._taken_outside
        if grown is None or grown <= 0:
            return None
        points = [*outside_points(self._history), (self._steps, self._evidence.outside)]
        growth = judge_growth("outside", points, JUDGED_ONCE)
        if growth is None:
            return OnsetEvidence("outside", grown)
        return OnsetEvidence("outside", grown, growth.bytes_per_step, growth.since_step)

    @property
    def _taken_outside(self) -> int | None:
        """How much more is outside the allocator than in the earlier half of the run."""
        points = outside_points(self._history)
        if not points or self._evidence.total is None:
            return None
        return int(self._evidence.outside - min(size for _, size in points[: len(points) // 2 + 1]))

    @property
    def _surprise(self) -> int | None:
        """How much more the failed step needed, at least, than any step before."""
        if self._needed is None or not self._peaks:
            return None
        return max(0, int(self._needed - max(size for _, size in self._peaks)))

    def _appeared(self) -> OnsetEvidence | None:
        """Return long-lived tensors that appeared once."""
        jump, at = lasting_jump(self._kept)
        if jump <= 0:
            return None
        return OnsetEvidence("new_phase", int(jump), since_step=at)

    def _larger_step(self) -> OnsetEvidence | None:
        """Return what the failed step needed more than any before, beyond ordinary variation."""
        surprise = self._surprise or 0
        is_ordinary = surprise <= self._variation
        return None if is_ordinary else OnsetEvidence("larger_step", surprise)

    def _stranded(self) -> OnsetEvidence | None:
        """Return what has been stranded since the first snapshot."""
        known = [size for size in self._history.stranded_bytes if size is not None]
        free = self._evidence.cached_free + self._evidence.private_free
        stranded = free - (known[0] if known else 0)
        return OnsetEvidence("stranded", stranded) if stranded > 0 else None


def _is_before(change: OnsetEvidence, other: OnsetEvidence) -> bool:
    return (change.since_step or 0) <= (other.since_step or 0)
