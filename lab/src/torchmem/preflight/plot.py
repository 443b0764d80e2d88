"""The plot of a preflight: memory over the steps, and below it replays with other settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.allocator.sizes import GIB, format_size
from torchmem.output.plots import ALLOCATED, LIMIT, RESERVED, STRANDED, save, style
from torchmem.preflight.report import PreflightReport
from torchmem.preflight.result import GpuMemory
from torchmem.preflight.verdict import phantom_name
from torchmem.whatif.plot import PANEL_INCHES, fill, grid
from torchmem.whatif.result import WhatIf

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS_INCHES = 3.2
FRAME_INCHES = 1.4
MAX_LIMIT_RATIO = 3
"""A GPU with more than this many times the peak gets no line, which would flatten the bars."""


def draw(report: PreflightReport, path: Path) -> None:
    """Write the plot as png or svg. Raises UsageError if the file cannot be written."""
    from matplotlib.figure import Figure

    comparison = report.comparison
    replayed = comparison is not None and comparison.method == "replayed"
    settings = comparison.settings if comparison and replayed else None
    columns, rows = grid(settings) if settings else (2, 0)
    lower = rows * PANEL_INCHES[1] + FRAME_INCHES if settings else 0.0
    size = PANEL_INCHES[0] * max(2, columns), STEPS_INCHES + FRAME_INCHES + lower
    with style():
        figure = Figure(figsize=size, layout="constrained")
        _fill(figure, report, settings, lower)
        save(figure, path)


def _fill(
    figure: Figure, report: PreflightReport, settings: WhatIf | None, lower_inches: float
) -> None:
    heights = [STEPS_INCHES + FRAME_INCHES, *([lower_inches] if settings else [])]
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flatten()
    result = report.larger_run or report.result
    device = result.fullest_device if result.devices else None
    if device is not None:
        _draw_steps(parts[0].subplots(), device, report)
        parts[0].legend(loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"{'Fits' if report.verdict.fits else 'Does not fit'} a {phantom_name(report.plan.gpu)}, "
        f"cuda:{device.device if device else 0}",
        fontsize=12,
    )
    if settings:
        fill(parts[1], settings)
        parts[1].suptitle(
            "The same allocations with other settings, on the phantom GPU", fontsize=10
        )


def _draw_steps(panel: Axes, device: GpuMemory, report: PreflightReport) -> None:
    numbers = [step.step for step in device.steps]
    for column, color in (("peak_reserved", RESERVED), ("peak_allocated", ALLOCATED)):
        heights = [getattr(step, column) / GIB for step in device.steps]
        panel.bar(numbers, heights, width=0.8, color=color, label=column.replace("_", " "))
    left = [step.allocated / GIB for step in device.steps]
    label = "allocated at the end of the step"
    panel.plot(numbers, left, color=STRANDED, linewidth=1.4, marker=".", label=label)
    _draw_limit(panel, device, report.plan.gpu.memory_bytes - device.outside)
    _draw_axes(panel, len(numbers), on_larger_gpu=report.larger_run is not None)


def _draw_limit(panel: Axes, device: GpuMemory, available: int) -> None:
    label = f"GPU: {format_size(available)} for PyTorch"
    if available <= MAX_LIMIT_RATIO * device.peak_reserved:
        panel.axhline(available / GIB, color=LIMIT, linewidth=1, linestyle="--", label=label)
    else:
        panel.plot([], [], color=LIMIT, linestyle="--", label=f"{label} (off the scale)")


def _draw_axes(panel: Axes, steps: int, *, on_larger_gpu: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    where = " (on a larger phantom, because this one ran out of memory)" if on_larger_gpu else ""
    panel.set_xlim(0.4, max(1, steps) + 0.6)
    panel.set_ylabel("GiB")
    panel.set_xlabel("optimizer step" + where)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
