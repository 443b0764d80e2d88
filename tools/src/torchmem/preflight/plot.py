"""A preflight as a picture: memory over the steps against the card; below, if replayed, under other settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.allocator.sizes import GIB, format_size
from torchmem.preflight.outcome import DeviceMemory
from torchmem.preflight.report import Report
from torchmem.preflight.verdict import phantom, tightest
from torchmem.whatif.plot import (
    ALLOCATED,
    LIMIT,
    PANEL_INCHES,
    RESERVED,
    STRANDED,
    fill,
    grid,
    save,
    style,
)
from torchmem.whatif.result import WhatIf

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS_INCHES = 3.2
FRAME_INCHES = 1.4
FAR_ABOVE = 3
"""A card so many times the peak is told in words, as its line would press the bars to the ground."""


def draw(report: Report, path: Path) -> None:
    """Write the picture as png or svg; raises UsageError when the file cannot be written."""
    from matplotlib.figure import Figure

    found = report.comparison
    settings = found.settings if found and found.method == "replayed" else None
    columns, rows = grid(settings) if settings else (2, 0)
    height = STEPS_INCHES + rows * PANEL_INCHES[1] + FRAME_INCHES * (2 if rows else 1)
    with style():
        figure = Figure(figsize=(PANEL_INCHES[0] * max(2, columns), height), layout="constrained")
        _fill(figure, report, settings, height)
        save(figure, path)


def _fill(figure: Figure, report: Report, settings: WhatIf | None, height: float) -> None:
    upper = STEPS_INCHES + FRAME_INCHES
    parts = figure.subfigures(2 if settings else 1, 1, squeeze=False, height_ratios=[upper, height - upper] if settings
                              else None).flatten()  # fmt: skip
    shown = report.need or report.outcome
    device = tightest(shown) if shown.devices else None
    if device is not None:
        panel = parts[0].subplots()
        _steps(panel, device, report)
        parts[0].legend(loc="outside lower center", ncols=4, frameon=False)
    words = "Fits" if report.verdict.fits else "Does not fit"
    figure.suptitle(
        f"{words} a {phantom(report.plan.card)}, GPU {device.device if device else 0}", fontsize=12
    )
    if settings:
        fill(parts[1], settings)
        parts[1].suptitle(
            "The same allocations under other settings, on the phantom card", fontsize=10
        )


def _steps(panel: Axes, device: DeviceMemory, report: Report) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers = [step.step for step in device.steps]
    for column, color in (("peak_reserved", RESERVED), ("peak_allocated", ALLOCATED)):
        heights = [getattr(step, column) / GIB for step in device.steps]
        panel.bar(numbers, heights, width=0.8, color=color, label=column.replace("_", " "))
    left = [step.allocated / GIB for step in device.steps]
    panel.plot(
        numbers, left, color=STRANDED, linewidth=1.4, marker=".", label="left allocated at its end"
    )
    obtainable = report.plan.card.memory_bytes - device.outside
    if obtainable <= FAR_ABOVE * device.peak_reserved:
        panel.axhline(
            obtainable / GIB, color=LIMIT, linewidth=1, linestyle="--", label=_limit(obtainable)
        )
    else:
        panel.plot([], [], color=LIMIT, linestyle="--", label=f"{_limit(obtainable)} (far above)")
    panel.set_xlim(0.4, max(1, len(numbers)) + 0.6)
    panel.set_ylabel("GiB")
    panel.set_xlabel(
        "optimizer step"
        + (" (on a larger phantom, as this one ran out of memory)" if report.need else "")
    )
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _limit(obtainable: int) -> str:
    return f"card: {format_size(obtainable)} for PyTorch"
