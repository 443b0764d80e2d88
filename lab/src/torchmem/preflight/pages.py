"""The pages of `torchmem preflight`: plain text for a terminal of 100 columns."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Sequence

from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import OomReport, format_seconds
from torchmem.node.why import oom_why
from torchmem.node.words import explanation
from torchmem.output.terminal import aligned, counted, joined, wrapped
from torchmem.phantom.gpus import CATALOG, GpuModel
from torchmem.preflight.comparison import GpuModelRow, PreflightComparison
from torchmem.preflight.growth import deciding_growth, kept_per_step, needed_per_step
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.report import (
    PHANTOM_NOTE,
    PreflightReport,
    growth_on,
    notes,
    refuted_settings,
)
from torchmem.preflight.result import GpuMemory, Phase, RunResult
from torchmem.preflight.search import SearchResult, SearchRun
from torchmem.preflight.verdict import growth_sentence, phantom_name
from torchmem.sample.untrusted import sanitize_text
from torchmem.whatif.page import recommendation, table

PHASES: tuple[Phase, ...] = ("setup", "forward", "backward", "optimizer")
TABLE_COLUMNS = ("peak allocated", "peak reserved", "headroom", "retries", "seconds", "")


def gpu_model_table() -> str:
    """Return a table of all GPUs known by name."""
    head = ("GPU", "memory", "context", "SMs", "capability")
    lines = aligned([head, *map(_gpu_row, CATALOG)])
    products = ["product", *(gpu.product for gpu in CATALOG)]
    return "".join(f"{line}  {product}\n" for line, product in zip(lines, products, strict=True))


def run_page(report: PreflightReport) -> str:
    """Return the report of one run."""
    return joined(
        [
            [*wrapped(_title(report.plan)), *wrapped(_ending(report))],
            wrapped(report.verdict.sentence),
            list(aligned(_figures(report.result))) if report.result.devices else [],
            *(_explanation(report.oom, refuted_settings(report)) if report.oom else ()),
            *_comparison(report),
            ["Notes", *(line for note in notes(report) for line in wrapped(note, "  - "))],
        ]
    )


def _explanation(oom: OomReport, refuted: Container[str]) -> tuple[list[str], ...]:
    return explanation(oom_why(oom, None, may_look=True, refuted=refuted))


def search_page(result: SearchResult) -> str:
    """Return the table of a search."""
    option, search = result.search.option, result.search
    what = f"the largest {option} from {search.low:,} to {search.high:,}"
    rows = [
        ("  " + option, "steps", *TABLE_COLUMNS),
        *(_search_row(run, result) for run in result.runs),
    ]
    longer = ", and the largest value that fits is confirmed in a longer one"
    steps = steps_of_each(result.plan, longer, result.runs)
    return table_page(table_title(result.plan, what), steps, rows, search_sentence(result))


def search_sentence(result: SearchResult) -> str:
    """Return the conclusion of a search."""
    option, best, search = sanitize_text(result.search.option), result.best, result.search
    if best is None:
        return f"No value fits: {option} {search.low:,} already runs out of memory."
    device = best.result.fullest_device
    headroom = f"{format_size(device.headroom)} of headroom ({device.headroom / device.total:.0%})"
    retries = f" and {counted(device.retries, 'retry', 'retries')}" if device.retries else ""
    limit = (
        f"{best.value + 1:,} does not fit"
        if best.value < search.high
        else "larger values were not tried"
    )
    tried = f"tried for {counted(best.result.steps, 'optimizer step')}"
    return (
        f"{growth_first(best.result)}The largest value that fits is {option} {best.value:,}, "
        f"{tried}, with {headroom}{retries}; {limit}.{_without_retries(result)}"
        f"{_bytes_per_unit(result)}"
    )


def growth_first(result: RunResult) -> str:
    """Return the sentence about growth that decides, to stand before another; else empty."""
    found = deciding_growth(result)
    return f"{growth_sentence(found, result)} " if found else ""


def _gpu_row(gpu: GpuModel) -> tuple[str, ...]:
    sizes = format_size(gpu.memory_bytes), format_size(gpu.context_bytes)
    return gpu.name, *sizes, str(gpu.multiprocessors), ".".join(map(str, gpu.capability))


def _title(plan: RunPlan) -> str:
    command = sanitize_text(shlex.join(plan.command))
    name, size = phantom_name(plan.gpu), format_size(plan.gpu.memory_bytes)
    gpus = f"{plan.devices} GPUs, each a {name}" if plan.devices > 1 else f"a {name}"
    place = plan.placement
    rank = f", as rank {place.rank} of {place.world_size:,}" if place else ""
    return f"Preflight on {gpus} ({size}){rank}: {command}"


def _ending(report: PreflightReport) -> str:
    result = report.result
    how = {"steps": "Stopped", "oom": "Out of memory"}.get(result.ended, "Exited")
    number = result.calls if result.step_name == "forward call" else result.steps
    return (
        f"{how} after {counted(number, result.step_name)}; the run took "
        f"{format_seconds(result.seconds)} and {format_size(result.host_bytes)} of RAM on this "
        f"machine. The preflight took {format_seconds(report.seconds)} in all, with "
        f"{counted(report.runs, 'run')} of the script."
    )


def _figures(result: RunResult) -> list[list[str]]:
    """Return the figures as rows, with a column per GPU and, if there are several, a header."""
    devices = result.devices
    columns = [_device_figures(device, result) for device in devices]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[f"  {name}", *(column.get(name, "") for column in columns)] for name in names]
    header = [["", *(f"cuda:{device.device}" for device in devices)]]
    return [*(header if len(devices) > 1 else []), *rows]


def _device_figures(device: GpuMemory, result: RunResult) -> dict[str, str]:
    step = result.step_name.split()[-1]
    phases = dict(device.phase_peaks)
    in_phases = {
        f"  peak in {name}": format_size(phases[name]) for name in PHASES if name in phases
    }
    return {
        "peak allocated": format_size(device.peak_allocated),
        "  reached in": _peak_place(device, step),
        **in_phases,
        "peak reserved": format_size(device.peak_reserved),
        "outside PyTorch (estimate)": format_size(device.outside),
        **{f"  NCCL, {group}": format_size(size) for group, size in device.communicators},
        **({} if result.ended == "oom" else {"headroom": format_size(device.headroom)}),
        "stranded at worst": format_size(device.stranded),
        f"growth per {step}": _growth(device, step),
        **_peak_growth(device, step),
        "retries": f"{device.retries:,}",
        "device allocs": f"{device.device_allocs:,}",
    }


def _peak_place(device: GpuMemory, step: str) -> str:
    return f"{step} {device.peak_step:,}, {device.peak_phase}" if device.peak_step else "setup"


def _growth(device: GpuMemory, step: str) -> str:
    size = kept_per_step(device.steps)
    if size is None:
        return f"unknown (too few {step}s)"
    return format_size(size) if size else "none"


def _peak_growth(device: GpuMemory, step: str) -> dict[str, str]:
    """Return the growth of peaks where it exceeds the growth of what is kept."""
    size = needed_per_step(device.steps) or 0
    kept = kept_per_step(device.steps) or 0
    return {f"growth of peaks per {step}": format_size(size)} if size > 2 * kept else {}


def _comparison(report: PreflightReport) -> Iterator[list[str]]:
    comparison = report.comparison
    if comparison is None:
        yield wrapped(f"Other settings and GPUs were not compared: {report.no_comparison}")
        return
    gpu = f" for cuda:{comparison.settings.device}" if len(report.result.devices) > 1 else ""
    heading = f"Other settings on this GPU{gpu}, {_settings_source(comparison, report)}"
    yield [*wrapped(heading), "", *table(comparison.settings)]
    yield list(recommendation(comparison.settings))
    yield [
        f"Other GPUs{gpu} with this run's settings, replayed from the same trace",
        "",
        *aligned(_gpus(report, comparison)),
    ]


def _settings_source(comparison: PreflightComparison, report: PreflightReport) -> str:
    fidelity = comparison.settings.fidelity
    allocations = f"{fidelity.landed:,} of {fidelity.allocations:,} allocations"
    where = " of a run on a larger phantom" if report.larger_run else ""
    return f"replayed from the trace{where} ({allocations} get the recorded address: exact)"


def _gpus(report: PreflightReport, comparison: PreflightComparison) -> list[list[str]]:
    requested = report.plan.gpu.name
    return [
        ["", "", "peak", "", "", ""],
        ["  GPU", "memory", "reserved", "headroom", "retries", ""],
        *([_gpu_mark(row, requested), *_gpu_figures(report, row)] for row in comparison.gpus),
    ]


def _gpu_mark(row: GpuModelRow, requested: str) -> str:
    return ("> " if row.gpu.name == requested else "  ") + row.gpu.name


def _gpu_figures(report: PreflightReport, row: GpuModelRow) -> list[str]:
    memory, result = format_size(row.gpu.memory_bytes), row.result
    if result.refused:
        return [memory, "", "", "", "unknown"]
    if result.oom:
        return [memory, "", "", "", "does not fit"]
    sizes = format_size(result.peak_reserved), format_size(row.headroom)
    grows = growth_on(report, row)
    word = f"full after {grows.steps_left:,} more" if grows else "fits"
    return [memory, *sizes, f"{result.retries:,}", word]


def table_title(plan: RunPlan, what: str) -> str:
    """Return the title of several runs on one GPU model."""
    gpu = f"{phantom_name(plan.gpu)} ({format_size(plan.gpu.memory_bytes)})"
    return f"Preflight on a {gpu}, {what}: {sanitize_text(shlex.join(plan.command))}"


def steps_of_each(plan: RunPlan, end: str, runs: Sequence[SearchRun]) -> str:
    """Return after which steps each run is stopped, and how long all took; `end` is between."""
    seconds = format_seconds(sum(run.result.seconds for run in runs))
    return (
        f"Each run is stopped after {counted(plan.steps, 'optimizer step')}{end}. It took "
        f"{seconds} in all, with {counted(len(runs), 'run')} of the script."
    )


def table_page(
    title: str, steps: str, rows: Sequence[Sequence[str]], conclusion: str, *details: str
) -> str:
    """Return the page of several runs; details are lines after the conclusion."""
    return joined(
        [
            [*wrapped(title), *wrapped(steps)],
            list(aligned(rows)),
            wrapped(conclusion),
            details,
            wrapped(PHANTOM_NOTE),
        ]
    )


def _search_row(run: SearchRun, result: SearchResult) -> tuple[str, ...]:
    mark = "* " if run is result.best else "  "
    word = table_word(run.fits, run.result)
    return f"{mark}{run.value:,}", f"{run.result.steps:,}", *table_figures(run.result, word)


def table_word(fits: bool | None, result: RunResult) -> str:
    """Return the last cell of a row: whether the run fits."""
    if fits is None:
        return "no verdict"
    if result.ended != "oom" and deciding_growth(result):
        return "grows"
    return "fits" if fits else "does not fit"


def table_figures(result: RunResult, word: str) -> tuple[str, ...]:
    """Return the cells of `TABLE_COLUMNS`."""
    seconds = f"{result.seconds:.1f}"
    if not result.devices:
        return "", "", "", "", seconds, word
    device = result.fullest_device
    headroom = "" if result.ended == "oom" else format_size(device.headroom)
    sizes = format_size(device.peak_allocated), format_size(device.peak_reserved)
    return (*sizes, headroom, f"{device.retries:,}", seconds, word)


def _without_retries(result: SearchResult) -> str:
    """Return the largest value without a retry, if the best one had retries."""
    strained = {
        run.value for run in result.runs if not run.fits or run.result.fullest_device.retries
    }
    values = [run.value for run in result.runs if run.value not in strained]
    if not values or (result.best and values[-1] == result.best.value):
        return ""
    return f" Of those tried, {values[-1]:,} is the largest without a retry."


def _bytes_per_unit(result: SearchResult) -> str:
    size = result.bytes_per_unit
    if not size or size < 0:
        return ""
    return f" Each additional one takes about {format_size(size)}."
