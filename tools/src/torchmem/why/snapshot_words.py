"""What holds the memory of a snapshot, why a request failed, and what to do: text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import CAUSE_SUMMARIES, FRAGMENTATION_REASONS
from torchmem.output.terminal import aligned, counted, joined, wrapped
from torchmem.trace import holders_text
from torchmem.trace.holders import Holders
from torchmem.trace.holders_document import leak_rows
from torchmem.trace.holders_text import shown_line
from torchmem.trace.last_entries import Entry
from torchmem.trace.leaks import Leak
from torchmem.whatif.moment import FailureAtMoment, MomentMemory
from torchmem.whatif.page import recommendation
from torchmem.whatif.result import WhatIf

UNKNOWN_GPU = (
    "The snapshot does not say how large the GPU is, so what other processes and libraries hold "
    "is unknown."
)

_SIZES = (
    *("reserved", "in_use", "pending", "stranded", "releasable"),
    *("private_free", "largest_free"),
)


@dataclass(frozen=True, slots=True)
class SnapshotFindings:
    """What is known of one device at one moment beside what is in use; None is unknown.

    Attributes:
        memory: what PyTorch had reserved.
        leaks: the lines whose memory grew until then; None if the recording is too short.
        last: the entries before.
        settings: what other settings would have given.
        unreplayed: why `settings` is None, as a sentence; None if there is nothing to replay.
        command: what to type instead.
    """

    memory: MomentMemory | None
    leaks: Sequence[Leak] | None
    last: Sequence[Entry]
    settings: WhatIf | None = None
    unreplayed: str | None = None
    command: str | None = None


def page(found: Holders, more: SnapshotFindings, rows: int) -> str:
    """Return the page about one device at one moment, with at most `rows` rows per table."""
    sections = [
        list(holders_text.heading(found)),
        *(_memory(more.memory, rows) if more.memory else ()),
        *holders_text.tables(found, rows),
        holders_text.grown(more.leaks, rows) if more.leaks and found.has_stacks else [],
        list(_last(more.last, found)),
        list(_settings(more)),
    ]
    return joined(sections)


def values(more: SnapshotFindings) -> dict[str, Any]:
    """Return the same for JSON; null is unknown."""
    settings = more.settings
    return {
        "memory": _memory_values(more.memory) if more.memory else None,
        "leaks": leak_rows(more.leaks),
        "last_entries": [asdict(entry) for entry in more.last],
        "settings": asdict(settings.verdict) if settings else None,
    }


def headline(found: Holders, more: SnapshotFindings) -> str:
    """Return one sentence about a device: why a request failed, else what is in use."""
    if more.memory and more.memory.failed:
        return _cause(more.memory, more.memory.failed)
    return (
        f"{format_size(found.size_bytes)} is in use {holders_text.MOMENTS[found.at]}, "
        f"in {counted(found.blocks, 'block')}."
    )


def _memory_values(memory: MomentMemory) -> dict[str, Any]:
    sizes = {f"{name}_bytes": getattr(memory, name) for name in _SIZES}
    beside = [
        {**asdict(row.line), "bytes": row.size_bytes, "gaps": row.gaps} for row in memory.beside
    ]
    failed = None
    if memory.failed:
        failed = {
            "requested_bytes": memory.failed.requested,
            "driver_free_bytes": memory.failed.free,
            "total_bytes": memory.failed.total,
            "cause": memory.failed.cause,
            "detail": memory.failed.detail,
        }
    return {**sizes, "beside": beside, "failed": failed}


def _memory(memory: MomentMemory, rows: int) -> Iterator[list[str]]:
    if memory.failed:
        yield wrapped(_why(memory, memory.failed))
    parts = [
        ("in use, with rounding", memory.in_use),
        ("freed, waiting for a stream", memory.pending),
        ("stranded beside blocks in use", memory.stranded),
        ("releasable", memory.releasable),
        ("free in graph and MemPool pools", memory.private_free),
    ]
    cells = [
        (f"  {name}", format_size(size), f"{size / memory.reserved:.1%}")
        for name, size in parts
        if size
    ]
    if cells:
        yield [f"Reserved by PyTorch ({format_size(memory.reserved)})", *aligned(cells)]
    if memory.stranded and memory.beside:
        yield ["Free memory beside blocks in use, by the line of the block", *_beside(memory, rows)]


def _beside(memory: MomentMemory, rows: int) -> Iterator[str]:
    cells = [
        (f"  {shown_line(row.line.text)}", format_size(row.size_bytes), f"{row.gaps:,}")
        for row in memory.beside[:rows]
    ]
    yield from aligned([("", "free", "gaps"), *cells])
    if len(memory.beside) > rows:
        yield f"  and {len(memory.beside) - rows:,} more (--top {len(memory.beside)} shows all)"


def _why(memory: MomentMemory, failed: FailureAtMoment) -> str:
    """Return why the request failed, with the numbers, and what they do not show."""
    sentence = _cause(memory, failed)
    if failed.cause == "fragmentation" and failed.detail:
        sentence += f" {FRAGMENTATION_REASONS[failed.detail]}"
    return sentence if failed.total else f"{sentence} {UNKNOWN_GPU}"


def _cause(memory: MomentMemory, failed: FailureAtMoment) -> str:
    summary = CAUSE_SUMMARIES[failed.cause]
    cached = memory.stranded + memory.releasable
    return (
        f"{summary[0].upper()}{summary[1:]}: {format_size(failed.requested)} was needed, "
        f"{format_size(failed.free)} was free at the driver and {format_size(cached)} in "
        f"PyTorch's cache, the largest block {format_size(memory.largest_free)}."
    )


def _last(entries: Sequence[Entry], found: Holders) -> Iterator[str]:
    if not entries:
        return
    yield (
        "The last entries of the trace before it"
        if found.at != "end"
        else ("The last entries of the trace")
    )
    has_streams = any(entry.stream for entry in entries)
    for row in aligned([_row(entry, has_streams=has_streams) for entry in entries]):
        yield row.rstrip()


def _row(entry: Entry, *, has_streams: bool) -> tuple[str, ...]:
    before = "" if entry.seconds is None else f"{_duration(entry.seconds)} before"
    stream = (f"stream {entry.stream}",) if has_streams else ()
    line = shown_line(entry.line) if entry.line else ""
    return f"  {before}", entry.action, format_size(entry.size_bytes), *stream, line


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1000:,.1f} ms"


def _settings(more: SnapshotFindings) -> Iterator[str]:
    if more.settings is not None:
        yield "What other settings would have given, by a replay of the trace"
        for line in recommendation(more.settings):
            yield f"  {line}"
    elif more.unreplayed:
        yield from wrapped(more.unreplayed)
    if more.command:
        yield f"    {more.command}"
