"""OOM reports as plain text, for terminals of at least 88 columns."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

from torchmem.allocator.oom_report import (
    OomReport,
    failure_reason,
    format_seconds,
    memory_breakdown,
    preceding_events,
    summary,
)
from torchmem.allocator.rank_report import Fact, memory_facts, settings_facts
from torchmem.allocator.remedies import Remedy, remedies
from torchmem.allocator.sizes import format_size
from torchmem.oom.lines import held_lines
from torchmem.oom.where import where
from torchmem.sample.untrusted import sanitize_text

WIDTH = 88
BAR = 24
SUBJECT = 18
SPARKS = "▁▂▃▄▅▆▇█"
MAX_SPARKS = 30


def page(path: Path, report: OomReport) -> str:
    """Return everything about one OOM."""
    trend, file = list(_trend(report)), [f"Report: {sanitize_text(str(path))}"]
    cause, memory, advice = explanation(report)
    heading = [summary(report), "", *_heading(report)]
    asked, held = list(where(report)), list(held_lines(report))
    known = [*memory_facts(report.device), *settings_facts(report.allocator_settings)]
    memory = [*memory, *fact_lines(known)]
    sections = [heading, asked, cause, memory, held, trend, advice, file]
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def explanation(
    report: OomReport, refuted: Container[str] = ()
) -> tuple[list[str], list[str], list[str]]:
    """Return lines for why the request failed, where the memory was, and what to do.

    `refuted`: allocator settings that do not help, as a replay has shown.
    """
    return (
        wrapped(" ".join(failure_reason(report))),
        list(memory_lines(report.device.total_bytes, memory_breakdown(report))),
        list(advice_lines(remedies(report, refuted))),
    )


def table(reports: Iterable[tuple[Path, OomReport]]) -> str:
    """Return a list of reports, two lines each: the cause, and the file."""
    return "".join(f"{_row(report)}\n    {sanitize_text(str(path))}\n" for path, report in reports)


def _row(report: OomReport) -> str:
    process, oom = report.process, report.oom
    cause = f"{oom.cause} ({oom.detail})" if oom.detail else oom.cause
    requested = "" if oom.requested_bytes is None else format_size(oom.requested_bytes)
    origin = f"{_local_time(oom.timestamp)}  {process.run:<16}  rank {process.rank:<4}"
    return f"{origin}  {requested:>10}  {cause}"


def _local_time(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))


def _heading(report: OomReport) -> list[str]:
    process, device = report.process, report.device
    rank = f"rank {process.rank}" + (f" of {process.world_size}" if process.world_size else "")
    script = f" ({process.script})" if process.script else ""
    versions = [
        f"{name} {process.versions[name]}"
        for name in ("torch", "cuda", "hip")
        if name in process.versions
    ]
    gpu = [f"GPU {device.index}", device.name or "", device.uuid or ""]
    where = f"pid {process.pid} on {process.hostname}"
    first = f"{_local_time(report.oom.timestamp)}  run {process.run}{script}, {rank}, {where}"
    lines = first, "  ".join(word for word in gpu if word), "  ".join(versions)
    return [f"  {line}" for line in lines if line]


def wrapped(text: str, indent: str = "", first: str | None = None, width: int = WIDTH) -> list[str]:
    """Return the lines of a paragraph; `first` takes the place of the first line's indent."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def memory_lines(total: int | None, parts: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yield the use of a device of `total` bytes, by parts that add up to it."""
    if not total or not parts:
        return
    yield f"Memory of the GPU ({format_size(total)})"
    for name, size in parts:
        bar = "█" * round(BAR * min(1.0, size / total))
        yield f"  {name:<32}{format_size(size):>12}{size / total:>7.1%}  {bar}".rstrip()


def _trend(report: OomReport) -> Iterator[str]:
    seconds = report.trend.seconds
    yield f"The last {format_seconds(seconds[0])}" if seconds else "Before the OOM"
    for name, column in _columns(report):
        known = [size for size in column if size is not None]
        if len(known) > 1 and any(known):
            yield f"  {name:<10}{_spark(known)}  {format_size(known[0])} → {format_size(known[-1])}"
    yield from wrapped(" ".join(preceding_events(report)), "  ")


def _columns(report: OomReport) -> Iterator[tuple[str, Sequence[int | None]]]:
    """Yield the name and the values of each series of the trend; the OOM is the last value."""
    trend, allocator, layout = report.trend, report.device.allocator, report.layout
    yield (
        "allocated",
        (*trend.allocated_bytes, allocator.allocated_bytes.total if allocator else None),
    )
    yield "reserved", (*trend.reserved_bytes, report.reserved_bytes)
    yield "stranded", (*trend.stranded_bytes, layout.stranded_bytes if layout else None)
    yield "headroom", (*trend.headroom_bytes, layout.headroom_flush_bytes if layout else None)


def _spark(values: Sequence[float]) -> str:
    """Return a sparkline of at most MAX_SPARKS values, scaled from 0 to the highest."""
    number, highest = min(len(values), MAX_SPARKS), max(values)
    picked = (values[(index + 1) * len(values) // number - 1] for index in range(number))
    return "".join(SPARKS[int((len(SPARKS) - 1) * value / highest)] for value in picked)


def fact_lines(facts: Iterable[Fact], width: int = WIDTH) -> Iterator[str]:
    """Yield a table of facts, with the subject in the first column."""
    for fact in facts:
        first = f"  {fact.subject:<{SUBJECT}}"
        yield from wrapped(fact.text, " " * len(first), first, width)


def advice_lines(advice: Sequence[Remedy], width: int = WIDTH) -> Iterator[str]:
    """Yield what to do, numbered; the lines to type are not wrapped."""
    if advice:
        yield "What to do, most promising first"
    for number, remedy in enumerate(advice, 1):
        yield from wrapped(remedy.text, "     ", f"  {number}. ", width)
        yield from (f"         {line}" for line in remedy.lines)
