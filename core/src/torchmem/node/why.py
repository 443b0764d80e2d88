"""Explain the memory of one rank, and an OutOfMemoryError, in the words of the reports.

Whoever may not look gets all but what tells about the program: lines, tensors and the call stack.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from torchmem.allocator.sizes import format_size
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
from torchmem.explain.parts import (
    PartBytes,
    component_words,
    device_parts,
    part_words,
    plausible,
    rank_parts,
)
from torchmem.explain.rank_report import (
    Fact,
    ending,
    heading,
    memory_facts,
    next_request,
    rank_facts,
    settings_facts,
)
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import Remedy, gain_sentence
from torchmem.explain.run_chart import run_chart
from torchmem.explain.threats import advice, threats
from torchmem.explain.thresholds import Limits
from torchmem.host.process_table import process_key
from torchmem.node.gpu_notes import rank_notes
from torchmem.node.published import NodeRanks, Published
from torchmem.node.reports import newest_of
from torchmem.node.state import GpuNote, LabeledBytes, OomWhy, RankWhy
from torchmem.sample.remedy_words import REMEDY_WORDS
from torchmem.sample.sample import LIVE_STATES, DeviceSample, Sample

MAX_HOLDERS = 4


def rank_why(found: NodeRanks, item: Published, device: DeviceSample, *, may_look: bool) -> RankWhy:
    """Return the texts about a process on one of its devices.

    `may_look`: whether the client may see what tells about the program. Reads the OOM report beside
    the sample, if there is one.
    """
    sample, layout = item.sample, device.layout
    outside = found.outside.get((device.uuid or "", process_key(sample.process)))
    is_live = item.state in LIVE_STATES
    report = newest_of(found.run_dir, item) if device.last_oom and found.run_dir else None
    limits, index = found.limits(item), found.gpus.get(device.uuid or "")
    since = max(0, sample.steps.count - report.steps.count) if report else None
    words = rank_report(sample, device, found.time, index, limits)
    uuid = device.uuid or ""
    is_held = is_live or any(dead.pid == item.pid for dead in found.holders.dead.get(uuid, ()))
    notes = rank_notes(found, item, uuid) if is_held else ()
    return replace(
        words,
        id=item.id,
        holds=_holds(rank_parts(device, outside)),
        next_request=next_request(layout) if layout and is_live else None,
        ending=_ending(found, item),
        # Nothing threatens a process that is gone; how it ended is told instead.
        threats=words.threats if is_live else (),
        advice=(*_noted(notes), *(words.advice if is_live else _after_kill(found, item))),
        facts=(*_noted_facts(notes), *words.facts),
        oom=oom_why(report, index, may_look=may_look, steps_since=since) if report else None,
    )


def _noted(notes: Iterable[GpuNote]) -> Iterable[Remedy]:
    """Return what to do about those who hold a GPU and should not, each thing once."""
    return dict.fromkeys(Remedy(note.kind, note.remedy) for note in notes)


def _noted_facts(notes: Sequence[GpuNote]) -> Iterator[Fact]:
    """Yield who holds a GPU and should not."""
    if notes:
        yield Fact("who holds it", " ".join(note.text for note in notes))


def _holds(parts: Iterable[PartBytes]) -> str | None:
    largest = sorted(parts, key=lambda part: -part.bytes)[:MAX_HOLDERS]
    return ", ".join(f"{format_size(part.bytes)} {part_words(part)}" for part in largest) or None


def _ending(found: NodeRanks, item: Published) -> str | None:
    text = ending(item.sample, item.state)
    cause = found.kill_causes.get(process_key(item.sample.process))
    if item.state == "killed" and cause == "host_memory":
        return f"{text} The kernel killed it because the memory of the host was full."
    return text


def _after_kill(found: NodeRanks, item: Published) -> tuple[Remedy, ...]:
    cause = found.kill_causes.get(process_key(item.sample.process))
    is_killed = item.state == "killed" and cause
    return (Remedy(cause, f"{REMEDY_WORDS[cause]}."),) if is_killed and cause else ()


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
    report: OomReport,
    gpu: int | None,
    *,
    may_look: bool,
    steps_since: int | None = None,
    refuted: Container[str] = (),
) -> OomWhy:
    """Return the texts about an OOM report.

    `gpu`: NVML's index, None if it is unknown; `may_look`: with what tells about the program;
    `steps_since`: steps that have ended since the error, if that is known. `refuted`: allocator
    settings that do not help, as a replay has shown.
    """
    reason = [*failure_reason(report, gpu), aftermath(report, steps_since)]
    device = report.device
    return OomWhy(
        time=report.oom.timestamp,
        summary=headline(report),
        about=tuple(origin_lines(report, gpu)),
        reason=" ".join(filter(None, reason)),
        before=" ".join(preceding_events(report)),
        parts=tuple(_named(report)),
        advice=_in_words(remedies(report, refuted)),
        gains=report.verdict.gains if report.verdict else (),
        facts=(*memory_facts(device), *settings_facts(report.allocator_settings)),
        charts=oom_charts(report),
        listings=tuple(listings(oom_lines(report) if may_look else offer(report))),
        total_bytes=plausible(device.total_bytes),
        hidden=True if not may_look and any(program_lines(report)) else None,
    )


def _named(report: OomReport) -> Iterator[PartBytes]:
    """Yield the parts of the device; what is of more than one step is labeled so."""
    for part in memory_parts(report):
        words = part_words(part, report.steps.unread)
        if plausible(part.bytes):
            yield part if words == part_words(part) else replace(part, label=words)
