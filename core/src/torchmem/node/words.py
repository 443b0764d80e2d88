"""The records of a node as sections of plain text, for terminals and assistants."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from time import localtime, strftime

from torchmem.allocator.sizes import format_size
from torchmem.explain import where
from torchmem.explain.gpu_name import gpu_name
from torchmem.explain.oom_listings import Listing
from torchmem.explain.oom_report import format_seconds
from torchmem.explain.parts import PartBytes, component_words
from torchmem.explain.rank_report import Fact, settings_facts
from torchmem.explain.remedy import Remedy, gain_sentence
from torchmem.explain.run_chart import Chart
from torchmem.explain.run_summary import DeviceSummary, RunSummary
from torchmem.metrics.memory_parts import COMPONENTS, PARTS
from torchmem.node.state import OomWhy, RankWhy
from torchmem.output.terminal import joined, wrapped
from torchmem.sample.untrusted import sanitize_text

WIDTH = 88
BAR = 24
SUBJECT = 18
SPARKS = "▁▂▃▄▅▆▇█"
MAX_SPARKS = 30
MAX_POINTS = 1000
HIDDEN = "The exporter shows the program's lines only to the rank's own user."
MAX_TIME = 1e11
"""Later times, in Unix seconds, cannot be true."""


def oom_page(oom: OomWhy, file: str | None = None) -> str:
    """Return everything about one OOM. `file`: its report, if this machine has it."""
    reason, memory, advice = explanation(oom)
    about = (f"  {line}" for line in heading_lines(oom))
    return joined(
        [
            [*wrapped(f"{oom.summary}.", width=WIDTH), "", *about],
            *(_lines(each) for each in oom.listings if each.title.startswith(where.TITLE)),
            reason,
            [*memory, *fact_lines(oom.facts)],
            *(_lines(each) for each in oom.listings if not each.title.startswith(where.TITLE)),
            [HIDDEN] if oom.hidden else [],
            list(trend_lines(filter(None, map(sound, oom.charts)), oom.before)),
            advice,
            [f"Report: {sanitize_text(file)}"] if file else [],
        ]
    )


def explanation(oom: OomWhy) -> tuple[list[str], list[str], list[str]]:
    """Return why the request failed, where the memory was, and what to do."""
    return (
        wrapped(oom.reason, width=WIDTH),
        list(memory_lines(oom.total_bytes, labeled(oom.parts))),
        list(advice_lines(oom.advice)),
    )


def heading_lines(oom: OomWhy) -> list[str]:
    """Return the time, the process, and the GPU."""
    process, *about = oom.about or ("",)
    return [f"{local_time(oom.time)}  {process}".rstrip(), *about]


def listing_lines(oom: OomWhy) -> Iterator[list[str]]:
    """Yield the lists about an OOM, each with its title."""
    yield from map(_lines, oom.listings)
    if oom.hidden:
        yield [HIDDEN]


def _lines(listing: Listing) -> list[str]:
    return [listing.title, *(f"  {line}" for line in listing.lines)]


def labeled(parts: Iterable[PartBytes]) -> list[tuple[str, int]]:
    """Return what texts call each part, and its bytes; an unknown part has its name."""
    return [(part.label or _words(part.name), part.bytes) for part in parts]


def _words(name: str) -> str:
    known = PARTS.get(name) or COMPONENTS.get(name)
    return known.words if known else name


def sound(chart: Chart | None) -> Chart | None:
    """Return a chart from the network if it can be drawn."""
    if chart is None or not 0 < len(chart.x) <= MAX_POINTS:
        return None
    return chart if all(len(line.values) == len(chart.x) for line in chart.lines) else None


def local_time(time: float | None) -> str:
    """Return the date and time in the local time zone; "-" if it is unknown or cannot be true."""
    if time is None or not 0 <= time < MAX_TIME:
        return "-"
    return strftime("%Y-%m-%d %H:%M:%S", localtime(time))


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


def rank_sections(report: RankWhy, memory: Iterable[str], width: int = WIDTH) -> list[list[str]]:
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
