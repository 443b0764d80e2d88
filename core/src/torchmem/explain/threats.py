"""What threatens a running rank, judged by its latest sample, and what to do about it.

The thresholds are those of the alerts. Alerts also look at the minutes before, so they are fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from torchmem.allocator.oom_cause import CONTEXT_ALLOWANCE_BYTES
from torchmem.allocator.outside_memory import outside_bytes
from torchmem.allocator.sizes import ROUND_LARGE, format_size
from torchmem.explain.growth import steps_left
from torchmem.explain.headline import growth_sentence
from torchmem.explain.oom_report import OomReport, format_seconds
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import Remedy, in_order
from torchmem.explain.threat_words import (
    FAILS,
    FLUSHES,
    FRAGMENTED,
    NEARLY_FULL,
    NO_ROOM_FOR_LIBRARIES,
)
from torchmem.explain.thresholds import Limits
from torchmem.explain.verdict import Gain, OnsetEvidence, Verdict
from torchmem.sample.libraries import held_bytes
from torchmem.sample.sample import (
    DeviceSample,
    Layout,
    Onset,
    OomCause,
    OomDetail,
    OomRecord,
    Sample,
)

MAX_REMEDIES = 3
MIN_GAIN = 0.5
"""What compaction gains, as a share of what is left, for it to matter to a rank that retries."""


ThreatKind = Literal[
    "ended",
    "failed",
    "leak",
    "kept",
    "larger_step",
    "outside",
    "fragmentation",
    "capacity",
    "external",
    "library",
    "retries",
    "host",
    "settings",
]


@dataclass(frozen=True, slots=True)
class Threat:
    """One thing that may end the run or slow it down.

    Attributes:
        kind: what it is: how the process ended, an allocation that failed, what grows (a leak,
            other kept tensors, what a step needs, memory outside the allocator), and so on. None
            in the answer of an exporter that does not tell it.
        text: the sentence for people.
        cause, onset: those of the OOM to expect, as far as they are known.
        bytes: what it is about: the bytes that have grown or are stranded, or those that are left.
        bytes_per_step: the pace of what grows.
    """

    kind: ThreatKind | None = None
    text: str = ""
    cause: OomCause | None = None
    onset: Onset | None = None
    bytes: int | None = None
    bytes_per_step: float | None = None


def threats(sample: Sample, device: DeviceSample, limits: Limits) -> tuple[Threat, ...]:
    """Return what threatens a rank on one of its devices, the most urgent first."""
    return tuple(iter_threats(sample, device, limits))


def iter_threats(sample: Sample, device: DeviceSample, limits: Limits) -> Iterator[Threat]:
    """Yield the same threats one by one: many callers need only the first.

    If compaction would make more room than what has grown, fragmentation comes before the growth.
    """
    is_first = strands_most(device, limits)
    growth = (_fragmentation, _growth) if is_first else (_growth, _fragmentation)
    finders = (_failed, *growth, _capacity, _libraries, _retries, _host, _ignored)
    for find in finders:
        yield from find(sample, device, limits)


def strands_most(device: DeviceSample, limits: Limits) -> bool:
    """Return whether a rank is fragmented, and compaction would make more room than anything else.

    What has grown is all that an end of the growth could give back.
    """
    grown = device.growth.grown_bytes if device.growth else 0
    return _is_fragmented(device, limits) and (_compaction_gain(device) or 0) > grown


def _compaction_gain(device: DeviceSample) -> int | None:
    """Return how much larger the largest request could be if all free bytes were in one piece.

    That is what is stranded, without a piece of it that is itself the largest request.
    """
    layout, free = device.layout, device.driver_free_bytes
    if layout is None or layout.headroom_flush_bytes is None or free is None:
        return None
    gain = free + layout.free_bytes - layout.headroom_flush_bytes
    return min(layout.stranded_bytes, max(0, gain))


def advice(sample: Sample, device: DeviceSample, limits: Limits) -> tuple[Remedy, ...]:
    """Return at most MAX_REMEDIES remedies: that of the first threat, then the largest gain first.

    Of those whose gain is unknown, the most promising for each threat come first.
    """
    expected = dict.fromkeys(
        pair for threat in threats(sample, device, limits) for pair in _pairs(threat)
    )
    lists = [remedies(_next_oom(sample, device, *pair)) for pair in expected]
    by_place = (remedy for place in zip_longest(*lists) for remedy in place if remedy is not None)
    first = next((remedy for found in lists[:1] for remedy in found), None)
    others = (remedy for remedy in in_order(by_place) if first and remedy.text != first.text)
    return tuple(filter(None, (first, *others)))[:MAX_REMEDIES]


def first_advice(sample: Sample, device: DeviceSample, threat: Threat) -> Remedy | None:
    """Return the first remedy of `advice`, if this is the first threat that has one."""
    pair = next(_pairs(threat), None)
    found = remedies(_next_oom(sample, device, *pair)) if pair else ()
    return next(iter(found), None)


def _pairs(threat: Threat) -> Iterator[tuple[OomCause, Onset | None]]:
    """Yield the cause and onset of the OOM to expect, and a cause that has remedies of its own."""
    if threat.cause is not None:
        yield threat.cause, threat.onset
        if threat.cause != "capacity":
            yield threat.cause, None


def _next_oom(
    sample: Sample, device: DeviceSample, cause: OomCause, onset: Onset | None
) -> OomReport:
    """Return the OOM report of the smallest request that would fail now."""
    layout = device.layout
    headroom = layout.headroom_flush_bytes if layout else None
    detail: OomDetail | None = "stranded" if cause == "fragmentation" else None
    requested = (headroom or 0) + ROUND_LARGE
    why = _why(sample, device, onset) if onset else None
    gains = tuple(_gains(device)) if cause == "fragmentation" else ()
    return OomReport(
        timestamp=sample.timestamp,
        process=sample.process,
        device=device,
        oom=OomRecord(sample.timestamp, requested, cause, detail, onset=onset),
        driver_free_bytes=device.driver_free_bytes or 0,
        limit_bytes=None,
        layout=layout,
        layout_before=layout,
        steps=sample.steps,
        allocator_settings=sample.allocator_settings,
        verdict=Verdict(cause, detail, why, gains) if onset or gains else None,
    )


def _gains(device: DeviceSample) -> Iterator[Gain]:
    """Yield what compaction would free, if that is known."""
    gain, per_step = _compaction_gain(device), device.growth and device.growth.bytes_per_step
    if gain:
        yield Gain("compaction", gain, gain / per_step if per_step else None, matters=True)


def _why(sample: Sample, device: DeviceSample, onset: Onset) -> OnsetEvidence | None:
    """Return the onset of the OOM that what grows will cause, or has caused.

    The growth is taken up to the steps of the sample, which may be newer than the judgment.
    """
    growth = device.growth
    if growth is None or growth.onset != onset:
        return OnsetEvidence(onset) if onset == "leak" else None
    rate, since = growth.bytes_per_step, growth.since_step
    grown = max(growth.grown_bytes, int(rate * (sample.steps.count - since)))
    return OnsetEvidence(growth.onset, grown, rate, since, growth.component)


def _failed(sample: Sample, device: DeviceSample, _: Limits) -> Iterator[Threat]:
    if sample.oom_pending and device.last_oom:
        line = f" at {device.last_oom.line}" if device.last_oom.line else ""
        text = f"An allocation has failed{line} and no step has ended since: run `torchmem why`."
        yield Threat("failed", text, device.last_oom.cause, device.last_oom.onset)


def _growth(sample: Sample, device: DeviceSample, _: Limits) -> Iterator[Threat]:
    growth, left = device.growth, steps_left(device)
    if growth is None:
        return
    seconds = sample.steps.mean_seconds
    time = f" ({format_seconds(left * seconds)})" if left is not None and seconds else ""
    kind: ThreatKind = "leak" if growth.is_leak else growth.kind
    cause: OomCause = "external" if kind == "outside" else "capacity"
    text = f"{growth_sentence(growth, left)}{time}."
    rate = growth.bytes_per_step
    yield Threat(kind, text, cause, growth.onset, growth.grown_bytes, rate)


def _is_below(size: int | None, ratio: float, device: DeviceSample) -> bool:
    return size is not None and device.total_bytes is not None and size < ratio * device.total_bytes


def is_severe(index: float | None, limits: Limits) -> bool:
    """Return whether a fragmentation index is above what is considered severe."""
    return index is not None and index > limits.fragmentation_ratio


def _is_stranded(layout: Layout, device: DeviceSample, limits: Limits) -> bool:
    stranded = layout.stranded_bytes
    is_share = not _is_below(stranded, limits.stranded_ratio, device)
    return stranded >= limits.stranded_bytes and is_share


def _is_fragmented(device: DeviceSample, limits: Limits) -> bool:
    """Return whether much is stranded and the rank needs it.

    It does if little can be allocated without a flush, or if it has retried or grows and
    compaction would make much more room than there is.
    """
    layout = device.layout
    if layout is None or layout.headroom_bytes is None or not _is_stranded(layout, device, limits):
        return False
    is_asked = bool(device.counters.alloc_retries) or device.growth is not None
    is_much = (_compaction_gain(device) or 0) > MIN_GAIN * (layout.headroom_flush_bytes or 0)
    return (is_asked and is_much) or _is_below(layout.headroom_bytes, limits.headroom_ratio, device)


def _fragmentation(_: Sample, device: DeviceSample, limits: Limits) -> Iterator[Threat]:
    layout = device.layout
    if layout is None or not _is_fragmented(device, limits):
        return
    stranded, headroom = layout.stranded_bytes, layout.headroom_bytes or 0
    share = f" ({stranded / device.total_bytes:.0%} of the GPU)" if device.total_bytes else ""
    fails = (layout.headroom_flush_bytes or 0) <= headroom
    text = FRAGMENTED.format(
        stranded=f"{format_size(stranded)}{share}",
        headroom=format_size(headroom),
        end=FAILS if fails else FLUSHES,
    )
    yield Threat("fragmentation", f"{text}.", "fragmentation", bytes=stranded)


def _capacity(_: Sample, device: DeviceSample, limits: Limits) -> Iterator[Threat]:
    layout = device.layout
    headroom = layout.headroom_flush_bytes if layout else None
    if headroom is None or not _is_below(headroom, limits.near_capacity_ratio, device):
        return
    if device.shares_host_memory:
        return  # what the host has left is the threat
    outside = outside_bytes(device, device.driver_free_bytes) or 0
    own = held_bytes(each for each in device.communicators.values() if each.is_counted)
    foreign = outside - own - (device.managed_bytes or 0) - CONTEXT_ALLOWANCE_BYTES
    if foreign > 0 and not _is_below(foreign, limits.near_capacity_ratio, device):
        held = f", while {format_size(outside)} is held outside PyTorch's allocator"
        cause: OomCause = "external"
    elif _is_fragmented(device, limits):
        return  # compaction would make room
    else:
        held, cause = "", "capacity"
    yield Threat(
        "external" if cause == "external" else "capacity",
        f"{NEARLY_FULL.format(headroom=format_size(headroom))}{held}.",
        cause,
        bytes=headroom,
    )


def _libraries(_: Sample, device: DeviceSample, limits: Limits) -> Iterator[Threat]:
    layout, free = device.layout, device.driver_free_bytes
    if device.shares_host_memory:
        return
    releasable = layout.releasable_bytes if layout else 0
    is_short = free is not None and free < limits.gpu_library_bytes
    if free is not None and is_short and releasable >= limits.library_releasable_bytes:
        text = NO_ROOM_FOR_LIBRARIES.format(
            free=format_size(free), releasable=format_size(releasable)
        )
        yield Threat("library", f"{text}.", "library", bytes=releasable)


def _retries(sample: Sample, device: DeviceSample, _: Limits) -> Iterator[Threat]:
    retries, steps = device.counters.alloc_retries or 0, sample.steps.count
    if retries:
        often = f", in {steps:,} steps" if steps else ""
        times = "once" if retries == 1 else f"{retries:,} times"
        text = f"PyTorch has emptied its whole cache {times} to retry an allocation{often}."
        yield Threat("retries", text)


def _host(sample: Sample, device: DeviceSample, limits: Limits) -> Iterator[Threat]:
    host = sample.host
    if host is None or host.limit_bytes is None or host.available_bytes is None:
        return
    if host.available_bytes < limits.host_available_ratio * host.limit_bytes:
        shared = ", which the GPU shares," if device.shares_host_memory else ""
        yield Threat(
            "host",
            f"Host memory{shared} is almost full: {format_size(host.available_bytes)} of "
            f"{format_size(host.limit_bytes)} is left.",
            bytes=host.available_bytes,
        )


def _ignored(sample: Sample, _: DeviceSample, __: Limits) -> Iterator[Threat]:
    names = [name for name, ignored in sample.settings_ignored.items() if ignored]
    if names:
        text = f"PyTorch has ignored these allocator settings: {', '.join(names)}."
        yield Threat("settings", text)
