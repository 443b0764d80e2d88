"""The records of a node as sections of plain text, for terminals and assistants."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from torchmem.allocator.sizes import format_size
from torchmem.explain.gpu_name import gpu_name
from torchmem.explain.headline import headline
from torchmem.explain.oom_listings import held_lines, offer, tensor_lines
from torchmem.explain.oom_report import (
    OomReport,
    failure_reason,
    format_seconds,
    memory_parts,
    origin_lines,
)
from torchmem.explain.parts import component_words, part_words
from torchmem.explain.rank_report import Fact, settings_facts
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import Remedy, gain_sentence
from torchmem.explain.run_chart import Chart
from torchmem.explain.run_summary import DeviceSummary, RunSummary
from torchmem.explain.thresholds import Limits
from torchmem.explain.where import where
from torchmem.node.state import RankWhy
from torchmem.node.summaries import steps_since
from torchmem.node.why import oom_why, rank_report, with_replay
from torchmem.output.terminal import joined, wrapped
from torchmem.sample.sample import DeviceSample, Sample
from torchmem.sample.untrusted import sanitize_text

WIDTH = 88
RANK_WIDTH = 80
BAR = 24
SUBJECT = 18
SPARKS = "▁▂▃▄▅▆▇█"
MAX_SPARKS = 30


def oom_page(
    path: Path,
    report: OomReport,
    gpus: Mapping[str, int],
    sentence: str | None = None,
    leaks: Sequence[str] = (),
) -> str:
    """Return everything about one OOM.

    `gpus` are NVML's indices by UUID, where known. `sentence` replaces the headline, and `leaks`
    are lines about what leaks, where a recording shows more than the report.
    """
    gpu = gpus.get(report.device.uuid or "")
    _, memory, advice = explanation(report, gpu=gpu)
    about = (f"  {line}" for line in heading_lines(report, gpu))
    heading = [*wrapped(f"{sentence or headline(report)}.", width=WIDTH), "", *about]
    why = oom_why(report, gpu, may_look=True, steps_since=steps_since(path, report))
    return joined(
        [
            heading,
            list(where(report)),
            wrapped(why.reason, width=WIDTH),
            [*memory, *fact_lines(why.facts)],
            [*leaks, *held_lines(report)],
            list(tensor_lines(report)),
            list(trend_lines(why.charts, why.before)),
            advice,
            list(offer(report)),
            [f"Report: {sanitize_text(str(path))}"],
        ]
    )


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
        list(advice_lines(remedies(report, refuted))),
    )


def local_time(timestamp: float) -> str:
    """Return the date and time in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))


def heading_lines(report: OomReport, index: int | None) -> list[str]:
    """Return the time, the process, and the GPU; `index` is NVML's."""
    process, *rest = origin_lines(report, index)
    return [f"{local_time(report.oom.timestamp)}  {process}", *rest]


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


def trend_lines(charts: Iterable[Chart], events: str) -> Iterator[str]:
    """Yield the history of the run and of the minutes before an OOM, and what happened in them.

    `charts` and `events` are those of an `OomWhy`; without a chart of the minutes, only the events.
    """
    of_minutes = {chart.unit == "before": chart for chart in charts}
    yield from run_lines(of_minutes.get(False))
    before = of_minutes.get(True)
    yield f"The last {format_seconds(-before.x[0])}" if before else "Before the OOM"
    for line in before.lines if before else ():
        yield from spark_lines(line.label, line.values, width=SUBJECT)
    yield from wrapped(events, "  ", WIDTH)


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


def rank_page(
    sample: Sample,
    now: float,
    gpus: Mapping[str, int],
    limits: Limits,
    replays: Mapping[int, str] = {},
) -> str:
    """Return the report of a process: one part for each of its devices.

    `gpus` are NVML's indices by UUID, as far as they are known. `replays`: what a replay shows
    about the setting that is advised first, by torch's index.
    """
    reports = (
        (device, rank_report(sample, device, now, gpus.get(device.uuid or ""), limits))
        for device in sample.devices
    )
    return "\n".join(
        _device_page(device, with_replay(report, replays.get(device.index)), now)
        for device, report in reports
    )


def _device_page(device: DeviceSample, report: RankWhy, now: float) -> str:
    read = device.stats_timestamp
    parts = [(part.label, part.bytes) for part in report.memory]
    age = None if read is None else max(0.0, now - read)
    return joined(rank_sections(report, memory_lines(device.total_bytes, parts, age, RANK_WIDTH)))


def rank_sections(
    report: RankWhy, memory: Iterable[str], width: int = RANK_WIDTH
) -> list[list[str]]:
    """Return the sections of a report, in lines of at most `width` columns.

    `memory`: the lines about the device. Lines to type and the names and sizes of the memory's
    parts may be longer.
    """
    return [
        [*report.heading],
        [*memory],
        [*fact_lines(report.facts, width)],
        [*run_lines(report.run)],
        [*_threat_lines(report, width)],
        [*advice_lines(report.advice, width)],
    ]


def _threat_lines(report: RankWhy, width: int) -> Iterator[str]:
    """Yield what threatens a process that has not ended."""
    if report.ending:
        return
    yield "Threats"
    for threat in report.threats:
        yield from wrapped(threat.text, "  - ", width)
    if not report.threats:
        yield "  Nothing at the moment."


def summary_page(path: Path, summary: RunSummary) -> str:
    """Return how a run went: its end, the peak of each device, and what the peak consisted of."""
    process = summary.process
    who = f"Run {process.run}, rank {process.rank} (pid {process.pid})"
    heading = [who, *wrapped(summary.verdict, "  ", WIDTH)]
    mean = summary.mean_step_seconds
    each = "" if mean is None else f", {mean:.2f} s each"
    about = [
        Fact("until", local_time(summary.timestamp)),
        Fact("steps", f"{summary.steps:,}{each}"),
    ]
    devices = [_device_lines(device) for device in summary.devices]
    settings = fact_lines(settings_facts(summary.allocator_settings))
    file = [f"Summary: {sanitize_text(str(path))}"]
    return joined([heading, list(fact_lines(about)), *devices, list(settings), file])


def _device_lines(device: DeviceSummary) -> list[str]:
    sizes = {
        "total": device.total_bytes,
        "peak reserved": device.reserved_peak_bytes,
        "peak active": device.active_peak_bytes,
        "peak allocated": device.allocated_peak_bytes,
        "left at the peak": device.headroom_bytes,
    }
    facts = [Fact(name, format_size(size)) for name, size in sizes.items() if size is not None]
    counts = {
        "retries": device.counters.alloc_retries,
        "OOMs": sum((device.counters.ooms or {}).values()),
    }
    facts += [Fact(name, f"{count:,}") for name, count in counts.items() if count]
    parts = [(component_words(name), size) for name, size in device.component_peaks.items()]
    lines = [gpu_name(device.index, device.uuid, None), *fact_lines(facts)]
    if parts:
        lines += ["", "What the peak consisted of"]
        lines += [f"  {name:<32}{format_size(size):>12}" for name, size in parts]
    return lines
