"""The answer as a plot: one panel per setting, all on the same scales. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmem.allocator.sizes import GIB, format_size
from torchmem.output.plots import ALLOCATED, GOOD, LIMIT, RESERVED, STRANDED, save, style
from torchmem.sample.untrusted import sanitize_text
from torchmem.whatif.result import FailedRequest, ReplayResult, WhatIf

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

PANEL_INCHES = (4.6, 2.5)
MAX_GPU_SCALE = 1.5
"""A GPU larger than this multiple of the peak is not drawn: it would flatten all curves."""


def draw(result: WhatIf, path: Path) -> None:
    """Write the plot as png or svg. Raise UsageError if the file cannot be written."""
    from matplotlib.figure import Figure

    with style():
        columns, rows = grid(result)
        size = PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 1.1
        figure = Figure(figsize=size, layout="constrained")
        fill(figure, result)
        subject = f"{sanitize_text(result.name)}, cuda:{result.device}"
        figure.suptitle(f"{subject}: the same allocations under other settings", fontsize=12)
        save(figure, path)


def grid(result: WhatIf) -> tuple[int, int]:
    """Return the number of columns and rows of panels."""
    panels = len(_drawn(result))
    columns = 1 if panels == 1 else 2 if panels <= 4 else 3
    return columns, -(-panels // columns)


def fill(figure: FigureBase, result: WhatIf) -> None:
    """Draw one panel for each setting, and a legend below them."""
    replays, (columns, rows) = _drawn(result), grid(result)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = axes.flatten().tolist()
    for panel, replay in zip(panels, replays, strict=False):
        _draw_panel(panel, result, replay)
    for panel in panels[len(replays) :]:
        panel.remove()
    _draw_axes(panels[: len(replays)], result, columns)
    keys = _legend(result)
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)


def _drawn(result: WhatIf) -> list[ReplayResult]:
    return [replay for replay in result.outcomes if replay.refused is None and replay.timeline]


def _draw_panel(panel: Axes, result: WhatIf, replay: ReplayResult) -> None:
    events = [point.event for point in replay.timeline]
    for column, color in (("reserved", RESERVED), ("allocated", ALLOCATED)):
        panel.fill_between(events, _gib(replay, column), step="post", color=color, linewidth=0)
    stranded = _gib(replay, "stranded")
    panel.plot(events, stranded, drawstyle="steps-post", color=STRANDED, linewidth=1.4)
    if result.gpu_bytes is not None and _is_gpu_drawn(result):
        panel.axhline(result.gpu_bytes / GIB, color=LIMIT, linewidth=1, linestyle="--")
    if replay.oom is not None:
        _mark_oom(panel, result, replay.oom)
    is_recommended = replay.name == result.verdict.recommended
    title = f"{replay.name} (recommended)" if is_recommended else replay.name
    color = GOOD if is_recommended else "black"
    panel.set_title(title, loc="left", fontsize=10, fontweight="bold", color=color)
    panel.set_title(_numbers(replay), loc="right", fontsize=8.5)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _mark_oom(panel: Axes, result: WhatIf, oom: FailedRequest) -> None:
    """Draw a cross at the failed request, with its size on the side that has room."""
    place = oom.event, oom.reserved / GIB
    is_left = oom.event > result.events / 2
    panel.plot(*place, "X", color=LIMIT, markersize=9, clip_on=False, zorder=5)
    panel.annotate(
        f"OOM asking {format_size(oom.requested)}",
        place,
        xytext=(-9 if is_left else 9, 0),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="center",
        fontsize=8.5,
        color=LIMIT,
        zorder=5,
        bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1},
    )


def _is_gpu_drawn(result: WhatIf) -> bool:
    return result.gpu_bytes is not None and result.gpu_bytes <= MAX_GPU_SCALE * _peak(result)


def _peak(result: WhatIf) -> int:
    return max(replay.peak_reserved for replay in result.outcomes)


def _numbers(replay: ReplayResult) -> str:
    retries = ""
    if replay.retries:
        retries = f", {replay.retries:,} {'retry' if replay.retries == 1 else 'retries'}"
    return f"peak {format_size(replay.peak_reserved)}{retries}"


def _gib(replay: ReplayResult, column: str) -> list[float]:
    return [getattr(point, column) / GIB for point in replay.timeline]


def _draw_axes(panels: list[Any], result: WhatIf, columns: int) -> None:
    gpu = result.gpu_bytes or 0 if _is_gpu_drawn(result) else 0
    for number, panel in enumerate(panels):
        panel.set_ylim(0, 1.1 * max(_peak(result), gpu, 1) / GIB)
        panel.set_xlim(0, max(1, result.events))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if number % columns == 0:
            panel.set_ylabel("GiB")
        if number >= len(panels) - columns:
            panel.tick_params(labelbottom=True)
            panel.set_xlabel("event of the trace")


def _legend(result: WhatIf) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[Any] = [
        Patch(color=RESERVED, label="reserved"),
        Patch(color=ALLOCATED, label="allocated"),
        Line2D([], [], color=STRANDED, label="stranded (free, but cannot go back to the driver)"),
    ]
    if result.gpu_bytes is not None:
        far_above = "" if _is_gpu_drawn(result) else " (far above)"
        label = f"GPU: {format_size(result.gpu_bytes)}{far_above}"
        keys.append(Line2D([], [], color=LIMIT, linestyle="--", label=label))
    if any(replay.oom for replay in result.outcomes):
        label = "out of memory"
        keys.append(Line2D([], [], color=LIMIT, marker="X", linestyle="none", label=label))
    return keys
