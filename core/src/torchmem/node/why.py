"""Explain the memory of one rank, and an OutOfMemoryError, in the words of the reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torchmem.explain.headline import headline
from torchmem.explain.oom_chart import oom_charts
from torchmem.explain.oom_listings import listings, offer, oom_lines, program_lines
from torchmem.explain.oom_report import (
    OomReport,
    aftermath,
    failure_reason,
    memory_parts,
    origin_lines,
    preceding_events,
)
from torchmem.explain.parts import component_words, device_parts, part_words, plausible
from torchmem.explain.rank_report import heading, memory_facts, rank_facts, settings_facts
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import Remedy, gain_sentence
from torchmem.explain.run_chart import run_chart
from torchmem.explain.threats import advice, threats
from torchmem.explain.thresholds import Limits
from torchmem.node.state import LabeledBytes, OomWhy, RankWhy
from torchmem.sample.sample import DeviceSample, Sample


def rank_report(
    sample: Sample, device: DeviceSample, now: float, gpu: int | None, limits: Limits
) -> RankWhy:
    """Return what its sample tells about a rank on one device, judged by `limits`.

    `now` is in Unix seconds, `gpu` NVML's index.
    """
    parts = device_parts(device, device.driver_free_bytes)
    return RankWhy(
        heading=heading(sample, device, now, gpu),
        memory=_labeled((part_words(part, sample.steps.unread), part.bytes) for part in parts),
        parts_at_peak=_labeled(
            (component_words(name), size)
            for name, size in sorted(device.component_peaks.items(), key=lambda item: -item[1])
        ),
        threats=threats(sample, device, limits),
        advice=_in_words(advice(sample, device, limits)),
        facts=rank_facts(sample, device, now),
        run=run_chart(device.run_history, device.total_bytes),
    )


def with_replay(report: RankWhy, shown: str | None) -> RankWhy:
    """Return a report that says with its first advice what a replay shows about that."""
    if shown is None:
        return report
    first, *others = report.advice
    return replace(report, advice=(replace(first, text=f"{first.text} {shown}"), *others))


def _labeled(parts: Iterable[tuple[str, int]]) -> tuple[LabeledBytes, ...]:
    return tuple(LabeledBytes(label, size) for label, size in parts if plausible(size))


def _in_words(found: Iterable[Remedy]) -> tuple[Remedy, ...]:
    """Return remedies whose text says what they gain."""
    return tuple(
        Remedy(each.kind, f"{each.text}{gain_sentence(each)}", each.lines) for each in found
    )


def oom_why(
    report: OomReport, gpu: int | None, *, may_look: bool, steps_since: int | None = None
) -> OomWhy:
    """Return the texts about an OOM report.

    `gpu`: NVML's index, None if it is unknown; `may_look`: with what tells about the program;
    `steps_since`: steps that have ended since the error, if that is known.
    """
    reason = [*failure_reason(report, gpu), aftermath(report, steps_since)]
    device = report.device
    return OomWhy(
        time=report.oom.timestamp,
        summary=headline(report),
        about=tuple(origin_lines(report, gpu)),
        reason=" ".join(filter(None, reason)),
        before=" ".join(preceding_events(report)),
        parts=tuple(part for part in memory_parts(report) if plausible(part.bytes)),
        advice=_in_words(remedies(report)),
        facts=(*memory_facts(device), *settings_facts(report.allocator_settings)),
        charts=oom_charts(report),
        listings=tuple(listings(oom_lines(report) if may_look else offer(report))),
        total_bytes=plausible(device.total_bytes),
        hidden=True if not may_look and any(program_lines(report)) else None,
    )
