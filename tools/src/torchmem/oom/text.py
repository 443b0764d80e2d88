"""Print OOM reports as plain text, for terminals with at least 88 columns."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from torchmem.allocator.sizes import format_size
from torchmem.cli.terminal import joined, wrapped
from torchmem.explain.headline import headline
from torchmem.explain.held_lines import held_lines
from torchmem.explain.offer import offer
from torchmem.explain.oom_chart import trend_columns, whole_run
from torchmem.explain.oom_report import (
    OomReport,
    failure_reason,
    format_seconds,
    memory_parts,
    origin_lines,
    preceding_events,
)
from torchmem.explain.parts import part_words
from torchmem.explain.rank_report import Fact, memory_facts, settings_facts
from torchmem.explain.remedies import Remedy, gain_sentence, remedies, would_not_help
from torchmem.explain.run_chart import Chart
from torchmem.explain.tensor_lines import tensor_lines
from torchmem.explain.where import where
from torchmem.oom.recorded import leak_lines, sentence
from torchmem.sample.untrusted import sanitize_text
from torchmem.snapshot.leaks import Leak

WIDTH = 88
BAR = 24
SUBJECT = 18
SPARKS = "▁▂▃▄▅▆▇█"
MAX_SPARKS = 30


def page(
    path: Path, report: OomReport, gpus: Mapping[str, int], leaking: Sequence[Leak] = ()
) -> str:
    """Return everything about one OOM.

    `gpus` are NVML's indices by UUID, where known; `leaking` the lines that leak according to a
    recording.
    """
    trend = [*run_lines(whole_run(report)), *_trend(report)]
    file = [f"Report: {sanitize_text(str(path))}"]
    gpu = gpus.get(report.device.uuid or "")
    cause, memory, advice = explanation(report, gpu=gpu)
    about = (f"  {line}" for line in heading_lines(report, gpu))
    heading = [*wrapped(f"{sentence(report, leaking)}.", width=WIDTH), "", *about]
    asked, held = list(where(report)), [*leak_lines(leaking), *held_lines(report)]
    tensors, offered = list(tensor_lines(report)), list(offer(report))
    known = [*memory_facts(report.device), *settings_facts(report.allocator_settings)]
    memory = [*memory, *fact_lines(known)]
    sections = [heading, asked, cause, memory, held, tensors, trend, advice, offered, file]
    return joined(sections)


def explanation(
    report: OomReport, refuted: Container[str] = (), gpu: int | None = None
) -> tuple[list[str], list[str], list[str]]:
    """Return why the request failed, where the memory was, and what to do.

    `refuted`: allocator settings that do not help, as a replay has shown. `gpu`: NVML's index.
    """
    parts = [(part_words(part, report.steps.unread), part.bytes) for part in memory_parts(report)]
    return (
        wrapped(" ".join(failure_reason(report, gpu)), width=WIDTH),
        list(memory_lines(report.device.total_bytes, parts)),
        [*advice_lines(remedies(report, refuted)), *_useless(report)],
    )


def _useless(report: OomReport) -> Iterator[str]:
    useless = would_not_help(report)
    if useless:
        yield from wrapped(useless, "  ", WIDTH)


def table(reports: Iterable[tuple[Path, OomReport]]) -> str:
    """Return a list of reports: the process and its request, the verdict, and the file."""
    return "".join(f"{line}\n" for path, report in reports for line in _row(path, report))


def _row(path: Path, report: OomReport) -> Iterator[str]:
    process, oom = report.process, report.oom
    requested = "" if oom.requested_bytes is None else f"  {format_size(oom.requested_bytes):>10}"
    yield f"{_local_time(oom.timestamp)}  {process.run:<16}  rank {process.rank:<4}{requested}"
    yield from wrapped(f"{headline(report)}.", "    ", WIDTH)
    yield f"    {sanitize_text(str(path))}"


def _local_time(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))


def heading_lines(report: OomReport, index: int | None) -> list[str]:
    """Return the time, the process, and the GPU; `index` is NVML's."""
    process, *rest = origin_lines(report, index)
    return [f"{_local_time(report.oom.timestamp)}  {process}", *rest]


def memory_lines(
    total: int | None,
    parts: Sequence[tuple[str, int]],
    age: float | None = None,
    width: int = WIDTH,
) -> Iterator[str]:
    """Yield the use of a device of `total` bytes, by parts that add up to it.

    `age` is the time since they were read, in seconds. There are no bars where lines of `width`
    columns have no room for them.
    """
    if not total or not parts:
        return
    ago = "" if age is None else f", {format_seconds(age)} ago"
    yield f"Memory of the GPU ({format_size(total)}){ago}"
    for name, size in parts:
        bar = "█" * round(BAR * min(1.0, size / total))
        sizes = f"  {name:<32}{format_size(size):>12}{size / total:>7.1%}"
        yield f"{sizes}  {bar}".rstrip() if width >= len(sizes) + 2 + BAR else sizes


def run_lines(chart: Chart | None) -> Iterator[str]:
    """Yield the history of the whole run as sparklines; nothing without one."""
    if chart is None:
        return
    end = chart.x[-1]
    yield f"The whole run ({f'{end:,.0f} steps' if chart.unit == 'steps' else format_seconds(end)})"
    for line in chart.lines:
        yield from spark_lines(line.label, _even(chart.x, line.values), width=SUBJECT)


def _even(x: Sequence[float], values: Sequence[int | None]) -> list[int]:
    """Return MAX_SPARKS values at equal distances, interpolated between known ones."""
    known = [(at, size) for at, size in zip(x, values, strict=True) if size is not None]
    if len(known) < 2:
        return [size for _, size in known]
    first, last = known[0][0], known[-1][0]
    places = [first + index * (last - first) / (MAX_SPARKS - 1) for index in range(MAX_SPARKS)]
    return [_between(known, place) for place in places]


def _between(known: Sequence[tuple[float, int]], place: float) -> int:
    after = min(bisect_left(known, place, key=itemgetter(0)), len(known) - 1)
    (low, before), (high, size) = known[max(0, after - 1)], known[after]
    share = (place - low) / (high - low) if high > low else 1.0
    return round(before + min(1.0, share) * (size - before))


def _trend(report: OomReport) -> Iterator[str]:
    seconds = report.trend.seconds
    yield f"The last {format_seconds(seconds[0])}" if seconds else "Before the OOM"
    for name, column in trend_columns(report):
        yield from spark_lines(name, column, width=SUBJECT)
    yield from wrapped(" ".join(preceding_events(report)), "  ", WIDTH)


def spark_lines(name: str, column: Sequence[int | None], *, width: int) -> Iterator[str]:
    """Yield a series of bytes as a sparkline, with its ends; nothing if it is unknown or 0.

    `width` is that of the name.
    """
    known = [size for size in column if size is not None]
    if len(known) > 1 and any(known):
        ends = f"{format_size(known[0])} → {format_size(known[-1])}"
        yield f"  {name:<{width}}{sparkline(known)}  {ends}"


def sparkline(values: Sequence[float], width: int = MAX_SPARKS, highest: float = 0) -> str:
    """Return a sparkline of at most `width` values, scaled from 0 to `highest` or the highest."""
    number, highest = min(len(values), width), max(highest, *values, 1)
    picked = (values[(index + 1) * len(values) // number - 1] for index in range(number))
    return "".join(SPARKS[int((len(SPARKS) - 1) * value / highest)] for value in picked)


def fact_lines(facts: Iterable[Fact], width: int = WIDTH) -> Iterator[str]:
    """Yield a table of facts, with the subject in the first column."""
    for fact in facts:
        first = f"  {fact.subject:<{SUBJECT}}"
        yield from wrapped(fact.text, first, width)


def advice_lines(advice: Sequence[Remedy], width: int = WIDTH) -> Iterator[str]:
    """Yield what to do, numbered; the lines to type are not wrapped."""
    if advice:
        yield "What to do, most promising first"
    for number, remedy in enumerate(advice, 1):
        yield from wrapped(f"{remedy.text}{gain_sentence(remedy)}", f"  {number}. ", width)
        yield from (f"         {line}" for line in remedy.lines)
