"""The report of one run: verdict, comparison with other settings and GPUs, and notes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torchmem.allocator.settings import parse_alloc_conf
from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import OomReport
from torchmem.node.reports import load
from torchmem.output.terminal import counted
from torchmem.phantom.gpus import GpuModel
from torchmem.preflight.comparison import GpuModelRow, PreflightComparison, compare
from torchmem.preflight.growth import GpuGrowth, growth
from torchmem.preflight.options import PreflightOptions
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import RunResult
from torchmem.preflight.runner import Runner
from torchmem.preflight.verdict import FitVerdict, growth_sentence, judge
from torchmem.sample.errors import UsageError

LARGER_FACTOR = 8
"""A script that runs out of memory is run again on a GPU with this many times the memory."""
PHANTOM_NOTE = (
    "A phantom GPU computes nothing: values read from it are zero, timings on it are meaningless, "
    "and the workspaces of some libraries are estimates."
)


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """What one run showed.

    oom: report of the OutOfMemoryError that ended the run. larger_run: if there was one, the same
    command on a GPU with `LARGER_FACTOR` times the memory. comparison: other settings and GPUs;
    None for the reason in `no_comparison`. runs, seconds: number of runs of the script, and wall
    time of the preflight in all.
    """

    plan: RunPlan
    result: RunResult
    verdict: FitVerdict
    oom: OomReport | None = None
    larger_run: RunResult | None = None
    comparison: PreflightComparison | None = None
    no_comparison: str | None = None
    runs: int = 1
    seconds: float = 0.0


def make_report(options: PreflightOptions, runner: Runner) -> PreflightReport:
    """Run the plan and analyze the result. Raises UsageError if there is no verdict."""
    plan = options.plan
    result = runner.run_visible(plan).checked()
    if options.snapshot:
        _copy_snapshot(result, options.snapshot)
    oom = load(result.oom_report) if result.oom_report and result.ended == "oom" else None
    larger_run, traced_on = _run_on_larger_gpu(plan, result, runner)
    verdict = judge(plan.gpu, result, oom, larger_run)
    report = PreflightReport(plan, result, verdict, oom, larger_run)
    report = _with_remedy(_compared(options, report, traced_on))
    return replace(report, runs=runner.runs, seconds=runner.elapsed_seconds())


def _compared(
    options: PreflightOptions, report: PreflightReport, traced_on: GpuModel
) -> PreflightReport:
    """Return the report with other settings and GPUs, or with why there are none."""
    result, larger_run = report.result, report.larger_run
    if larger_run is not None and larger_run.ended == "oom":
        reason = f"the script also runs out of memory with {LARGER_FACTOR} times this GPU's memory."
        return replace(report, no_comparison=reason)
    try:
        comparison = compare(options, larger_run or result, traced_on)
    except UsageError as reason:
        return replace(report, no_comparison=str(reason))
    return _with_replayed_figures(replace(report, comparison=comparison))


def _with_replayed_figures(report: PreflightReport) -> PreflightReport:
    """Replace what the run's statistics do not show exactly by an exact replay."""
    result, comparison = report.result, report.comparison
    if comparison is None or report.larger_run is not None:
        return report
    stranded = comparison.settings.outcomes[0].worst_stranded
    devices = tuple(
        replace(each, stranded=stranded) if each.device == comparison.settings.device else each
        for each in result.devices
    )
    return replace(report, result=replace(result, devices=devices))


def _with_remedy(report: PreflightReport) -> PreflightReport:
    """Add to the verdict, if the run does not fit, which setting or GPU of the tables fits.

    Where memory grows, none does.
    """
    verdict, comparison = report.verdict, report.comparison
    if verdict.fits or verdict.grows or comparison is None:
        return report
    name = comparison.settings.verdict.recommended
    best = next((each for each in comparison.settings.outcomes if each.name == name), None)
    if best is not None and best.refused is None and best.oom is None:
        conf = best.conf or "the default settings"
        size = format_size(best.peak_reserved)
        remedy = f"It fits with {conf}, which reserves {size}{_retries(best.retries)}."
        sentence = f"{verdict.sentence} {remedy}"
        return replace(report, verdict=replace(verdict, sentence=sentence, fits_with=best.conf))
    fitting = [row for row in comparison.gpus if not (row.result.refused or row.result.oom)]
    if not fitting:
        return report
    smallest = min(fitting, key=lambda row: row.gpu.memory_bytes)
    size = format_size(smallest.gpu.memory_bytes)
    remedy = (
        f"No setting that was compared makes it fit; {smallest.gpu.name} ({size}) is the smallest "
        f"GPU compared that it fits{_retries(smallest.result.retries)}."
    )
    return replace(report, verdict=replace(verdict, sentence=f"{verdict.sentence} {remedy}"))


def growth_on(report: PreflightReport, row: GpuModelRow) -> GpuGrowth | None:
    """Return the growth that fills another GPU soon, if the run grows; None otherwise."""
    found, traced = report.verdict.growth, report.larger_run or report.result
    device = next((each for each in traced.devices if found and each.device == found.device), None)
    if device is None or not report.verdict.grows:
        return None
    other = growth(device, row.gpu.memory_bytes, row.gpu.memory_bytes - row.headroom)
    return other if other and other.decides else None


def _retries(number: int) -> str:
    return f", with {counted(number, 'retry', 'retries')}" if number else ""


def notes(report: PreflightReport) -> Iterator[str]:
    """Yield what limits the report, the most serious first."""
    yield from _growth_notes(report)
    yield from _values_note(report.result)
    yield from _lacking_note(report.result)
    yield from _estimate_notes(report.result)
    if report.larger_run is not None:
        yield (
            f"The memory that the script needs was measured in a second run, on a phantom GPU with "
            f"{LARGER_FACTOR} times the memory. The replays use the trace of that run."
        )
    if report.comparison:
        yield (
            "Replays assume that the script requests the same sizes in the same order and, on "
            "other GPUs, that kernels and workspaces are the same as on this one."
        )
    yield PHANTOM_NOTE


def estimates(result: RunResult) -> tuple[str, ...]:
    """Return the fields of a GPU's figures that include an estimate."""
    if not result.devices:
        return ()
    peaks = ("peak_allocated", "peak_reserved") if result.estimated else ()
    return "outside", "headroom", *peaks


def _estimate_notes(result: RunResult) -> Iterator[str]:
    if result.devices:
        yield (
            "The CUDA context, which is outside PyTorch, is an estimate, accurate to about a "
            "quarter; headroom includes it."
        )
    if result.estimated:
        yield (
            f"Workspaces of {', '.join(result.estimated)} are estimates; the peaks and headroom "
            "include them."
        )


def refuted_settings(report: PreflightReport) -> frozenset[str]:
    """Return the allocator settings under which the comparison runs out of memory as well."""
    if report.comparison is None:
        return frozenset()
    tried = [
        (parse_alloc_conf(result.conf), result.oom is not None)
        for result in report.comparison.settings.outcomes
        if result.refused is None
    ]
    settings = {key for conf, _ in tried for key in conf}
    return frozenset(
        key for key in settings if all(failed for conf, failed in tried if key in conf)
    )


def _run_on_larger_gpu(
    plan: RunPlan, result: RunResult, runner: Runner
) -> tuple[RunResult | None, GpuModel]:
    """Run the plan again with more memory if it ran out of it.

    Returns that run, if any, and the GPU of the run whose trace is to be replayed.
    """
    if result.ended != "oom":
        return None, plan.gpu
    larger = replace(
        plan.gpu,
        name=f"{LARGER_FACTOR}x {plan.gpu.name}",
        memory_bytes=LARGER_FACTOR * plan.gpu.memory_bytes,
    )
    label = f"phantom with {LARGER_FACTOR} times the memory"
    second = runner.run_captured(replace(plan, gpu=larger), label)
    if second.error is None and second.devices:
        return second, larger
    return None, plan.gpu


def _copy_snapshot(result: RunResult, path: Path) -> None:
    """Copy the trace to `path`, readable by its owner only because it contains source paths."""
    if result.snapshot is None:
        raise UsageError(
            "--snapshot: no trace was recorded, as with an allocator other than PyTorch's own."
        )
    try:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with result.snapshot.open("rb") as source, open(target, "wb") as copy:  # noqa: PTH123 - a descriptor
            # An existing file has kept its own mode.
            os.fchmod(target, 0o600)
            shutil.copyfileobj(source, copy)
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror}): choose another file for --snapshot."
        ) from None


def _growth_notes(report: PreflightReport) -> Iterator[str]:
    """Yield the growth that is too slow to decide, or that ended with the run."""
    found = report.verdict.growth
    if found and not found.decides:
        yield growth_sentence(found, report.result)


def _values_note(result: RunResult) -> Iterator[str]:
    if result.values_read:
        yield (
            f"The script read values from the GPU {counted(result.values_read, 'time')}, for "
            "example with Tensor.item(), and got zeros. If its control flow depends on them (loss "
            "scaling, early stopping, data-dependent sizes), a real run may behave differently."
        )


def _lacking_note(result: RunResult) -> Iterator[str]:
    names = list(dict.fromkeys(result.lacking))
    if names:
        yield (
            f"The phantom GPU does not support {', '.join(names)}; the script continued without it."
        )
