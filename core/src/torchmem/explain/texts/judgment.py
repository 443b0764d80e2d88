"""What a message says about the cause of an OOM: the cause, or the causes that are possible.

The causes and changes are those of `torchmem.explain.verdict`. What a verdict takes from the run
and a message does not have, the margin and what was outside before, is unknown here: a cause is
told only if it is the cause for each value that they may have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from torchmem.allocator.oom_cause import COMMUNICATORS_ALLOWANCE_BYTES, OomEvidence
from torchmem.allocator.sizes import MIB
from torchmem.explain.oom_report import OomReport
from torchmem.explain.texts.formats import TextCause
from torchmem.explain.texts.numbers import Holder, Message, Numbers
from torchmem.explain.verdict import (
    CAUSE_BY_CHANGE,
    MIN_ROOM_RATIO,
    NEW_RATIO,
    Gain,
    Verdict,
    rooms,
)
from torchmem.sample.sample import (
    OOM_CAUSES,
    Allocator,
    ByPool,
    DeviceSample,
    OomCause,
    OomDetail,
    OomRecord,
    Process,
)

PRINTED = 1 / 200
"""A size is printed with two decimals, so it may be off by half a hundredth of its unit."""
SLACK_BYTES = 64 * MIB
"""By how much numbers of one message may disagree: they are read one after another."""
_UNITS = (1 << 30, 1 << 20, 1 << 10)
WAITING_RATIO = 2
"""Once the cache is empty, free blocks lie beside tensors. More of them than this many times the
tensors may be blocks that wait for another stream."""
OWN_EXTRA_BYTES = 4 << 30
"""What a process holds at most outside its allocator: a context, communicators, libraries."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a message says of the cause.

    Attributes:
        cause: the cause; None if the message does not decide.
        detail: the kind of fragmentation.
        candidates: the causes between which it does not decide; empty if it excludes none.
        report: the numbers as the report of an OOM, for its words and remedies; None where the
            message has too few numbers, or does not come from PyTorch's allocator.
        compaction: bytes that compacting PyTorch's memory would have given beyond the request, at
            most; None if unknown.
        holders: other processes on the GPU, the largest first.
        unlisted: bytes that no listed process holds, at least; None if unknown.
        own_pid: the pid on the host under which the process itself is listed, in a container.
    """

    cause: TextCause | None
    detail: OomDetail | None = None
    candidates: tuple[TextCause, ...] = ()
    report: OomReport | None = None
    compaction: int | None = None
    holders: tuple[Holder, ...] = ()
    unlisted: int | None = None
    own_pid: int | None = None


def judge_message(message: Message) -> Judged:
    """Return what a message says of the cause."""
    judge = _JUDGES.get(message.format.name)
    return judge(message) if judge else Judged(message.format.cause)


def _allocator(message: Message) -> Judged:
    """Judge a message of PyTorch's allocator."""
    numbers = _settled(message.numbers)
    others, own_pid = _others(numbers)
    found = Judged(None, holders=others, unlisted=_unlisted(numbers), own_pid=own_pid)
    if not _is_consistent(numbers) and not _is_oversubscribed(message, numbers):
        return found
    needed = _tensors(numbers) + (numbers.requested or 0)
    if numbers.total is not None and needed > numbers.total + tolerance(numbers.total):
        return _with_report(replace(found, cause="capacity"), numbers, ())
    if not message.is_whole or numbers.total is None or numbers.free is None:
        return found
    if _was_refused(numbers):  # unless a line with the limit is lost
        return found if message.is_joined else replace(found, cause="refused")
    return _weighed(found, numbers)


def _tensors(numbers: Numbers) -> int:
    """Return the bytes of tensors: PyTorch counts free blocks of private pools as allocated."""
    return max(0, (numbers.allocated or 0) - (numbers.private or 0))


def _settled(numbers: Numbers) -> Numbers:
    """Return the numbers with those that follow from others."""
    allocated, reserved = numbers.allocated, numbers.reserved
    unallocated = numbers.unallocated
    if allocated is not None and reserved is None and unallocated is not None:
        reserved = allocated + unallocated
    if allocated is not None and reserved is not None and unallocated is None:
        unallocated = max(0, reserved - allocated)
    return replace(numbers, reserved=reserved, unallocated=unallocated)


def tolerance(*sizes: int | None) -> int:
    """Return by how much a sum of printed sizes may be off."""
    units = (next((unit for unit in _UNITS if unit <= (size or 0)), 1) for size in sizes)
    return round(sum(PRINTED * unit for unit in units)) + 1


def _is_consistent(numbers: Numbers) -> bool:
    """Return whether the numbers can be those of one moment; a mixture of messages cannot."""
    total, free = numbers.total, numbers.free or 0
    if total is None:
        return True
    reserved = max(numbers.reserved or 0, numbers.allocated or 0)
    held = sum(holder.bytes or 0 for holder in numbers.holders)
    slack = tolerance(total, free, reserved, held) + SLACK_BYTES
    return free + max(reserved, held) <= total + slack and (
        numbers.reserved is None or (numbers.allocated or 0) <= numbers.reserved + slack
    )


def _is_oversubscribed(message: Message, numbers: Numbers) -> bool:
    """Return whether tensors take more than the GPU has, and nothing is free on it.

    On Windows and WSL, the driver moves what does not fit into host memory.
    """
    if numbers.total is None or message.is_joined or not message.is_whole:
        return False
    return (numbers.free or 0) <= SLACK_BYTES and _tensors(numbers) > numbers.total + SLACK_BYTES


def _was_refused(numbers: Numbers) -> bool:
    """Return whether the driver had what it did not give, and no limit forbade it."""
    free, requested = numbers.free or 0, numbers.requested or 0
    limit, reserved = numbers.allowed, numbers.reserved or 0
    slack = tolerance(free, requested, reserved, limit)
    return free >= requested + slack and (limit is None or reserved + requested + slack <= limit)


def _others(numbers: Numbers) -> tuple[tuple[Holder, ...], int | None]:
    """Return the other processes, the largest first, and the process's own pid if it is listed.

    In a container with pids of its own, PyTorch does not recognize itself in NVML's list: a process
    that holds what this one has reserved, and no line for this one, is this one.
    """
    listed = sorted(
        (holder for holder in numbers.holders if holder.pid is not None),
        key=lambda holder: -(holder.bytes or 0),
    )
    if any(holder.pid is None for holder in numbers.holders) or numbers.reserved is None:
        return tuple(listed), None
    least, most = numbers.reserved - tolerance(numbers.reserved), numbers.reserved + OWN_EXTRA_BYTES
    own = [each for each in listed if each.bytes is not None and least <= each.bytes <= most]
    if len(own) != 1:
        return tuple(listed), None
    return tuple(each for each in listed if each is not own[0]), own[0].pid


def _unlisted(numbers: Numbers) -> int | None:
    """Return the bytes in use that no listed process holds; None if processes are not listed."""
    if not numbers.holders or numbers.total is None or numbers.free is None:
        return None
    if any(holder.bytes is None for holder in numbers.holders):
        return None
    held = sum(holder.bytes or 0 for holder in numbers.holders)
    return max(0, numbers.total - numbers.free - held)


def _weighed(found: Judged, numbers: Numbers) -> Judged:
    """Return the causes for each margin and each amount that others may hold."""
    evidence = _evidence(numbers)
    total = evidence.total or 0
    margins = MIN_ROOM_RATIO * total, NEW_RATIO * total  # a run's own margin is mostly between
    verdicts = [
        _verdict(evidence, margin, foreign)
        for margin, foreign in product(margins, _foreign(found, evidence))
    ]
    causes = {verdict.cause for verdict in verdicts}
    compaction = next(
        (gain.bytes for gain in verdicts[0].gains if gain.change == "compaction"), None
    )
    found = replace(found, compaction=compaction)
    if len(causes) > 1:
        candidates = tuple(cause for cause in OOM_CAUSES if cause in causes)
        return _with_report(replace(found, candidates=candidates), numbers, ())
    (cause,) = causes
    detail = _detail(numbers) if cause == "fragmentation" else None
    if cause == "fragmentation" and detail is None and _may_wait(numbers):
        found = replace(found, candidates=("fragmentation", "pending"))
        return _with_report(found, numbers, ())
    return _with_report(replace(found, cause=cause, detail=detail), numbers, verdicts[-1].gains)


def _evidence(numbers: Numbers) -> OomEvidence:
    total = numbers.total or 0
    return OomEvidence(
        requested=numbers.requested or 0,
        limit=total if numbers.allowed is None else min(numbers.allowed, total),
        driver_free=numbers.free or 0,
        cached_free=numbers.unallocated or 0,
        reserved=numbers.reserved or 0,
        total=total,
        private_free=numbers.private or 0,
    )


def _foreign(found: Judged, evidence: OomEvidence) -> tuple[int, int]:
    """Return the least and the most that other processes may hold."""
    listed = sum(holder.bytes or 0 for holder in found.holders)
    most = max(listed, evidence.foreign(None, is_alone=False))
    if found.unlisted is not None:
        return listed, most
    return max(listed, evidence.outside - COMMUNICATORS_ALLOWANCE_BYTES, 0), most


def _verdict(evidence: OomEvidence, margin: float, foreign: int) -> Verdict:
    gains = tuple(
        Gain(change, room - evidence.requested, None, room - evidence.requested >= margin)
        for change, room in rooms(evidence, None, foreign)
        if room >= evidence.requested
    )
    best = max((gain for gain in gains if gain.matters), key=lambda gain: gain.bytes, default=None)
    return Verdict(CAUSE_BY_CHANGE[best.change] if best else "capacity", None, None, gains)


def _may_wait(numbers: Numbers) -> bool:
    unallocated = numbers.unallocated or 0
    return unallocated >= max(numbers.requested or 0, WAITING_RATIO * _tensors(numbers))


def _detail(numbers: Numbers) -> OomDetail | None:
    return "pool" if (numbers.private or 0) > (numbers.unallocated or 0) else None


def _malloc_async(message: Message) -> Judged:
    """Judge a message of cudaMallocAsync, whose pool is the driver's: what it caches is unknown."""
    numbers = message.numbers
    needed = (numbers.allocated or 0) + (numbers.requested or 0)
    total, allowed, free = numbers.total, numbers.allowed, numbers.free
    if total is not None and needed > total + tolerance(total):
        return _with_report(Judged("capacity"), numbers, ())
    if not message.is_whole or free is None:
        return Judged(None)
    if allowed is not None and needed > allowed - tolerance(allowed):
        return Judged("limit")
    if free >= (numbers.requested or 0) + tolerance(free, numbers.requested):
        return Judged("refused")
    return Judged(None, candidates=("capacity", "fragmentation", "external"))


def _start(message: Message) -> Judged:
    """Judge vLLM's start: would the share be free if others had not taken memory?"""
    total, free, wanted = message.numbers.total, message.numbers.free, message.numbers.requested
    if total is None or free is None or wanted is None or free > total or wanted > total:
        return Judged(None)
    evidence = OomEvidence(wanted, total, free, 0, 0, total)
    foreign = evidence.foreign(None, is_alone=False)
    return Judged("external" if free + foreign >= wanted and foreign else "limit")


_JUDGES: Mapping[str, Callable[[Message], Judged]] = {
    "pytorch": _allocator,
    "malloc_async": _malloc_async,
    "vllm_free_memory": _start,
}


def _with_report(judged: Judged, numbers: Numbers, gains: tuple[Gain, ...]) -> Judged:
    """Add the report of an OOM that has the numbers of the message, and no others."""
    cause = judged.cause
    if cause not in OOM_CAUSES or numbers.free is None:
        return judged
    return replace(judged, report=_report(cause, judged.detail, numbers, gains))


def _report(
    cause: OomCause, detail: OomDetail | None, numbers: Numbers, gains: tuple[Gain, ...]
) -> OomReport:
    index = numbers.gpu or 0
    versions = {"hip": ""} if numbers.backend == "HIP" else {}
    return OomReport(
        timestamp=0.0,
        process=Process(0, None, None, "", "", 0, versions=versions),
        device=DeviceSample(index, None, None, numbers.total, _statistics(numbers)),
        oom=OomRecord(0.0, numbers.requested, cause, detail),
        driver_free_bytes=numbers.free or 0,
        limit_bytes=numbers.allowed,
        layout=None,
        layout_before=None,
        verdict=Verdict(cause, detail, None, gains),
    )


def _statistics(numbers: Numbers) -> Allocator | None:
    if numbers.allocated is None or numbers.reserved is None:
        return None
    allocated = ByPool(None, None, _tensors(numbers))
    reserved = ByPool(None, None, numbers.reserved)
    return Allocator(allocated, allocated, reserved, None, None, None, None, None)
