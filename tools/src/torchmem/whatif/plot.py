"""A what-if answer as a picture: one panel for each setting, all on the same scales. Needs the extra `plot`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmem.allocator.sizes import GIB, format_size
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text
from torchmem.whatif.result import FailedRequest, ReplayResult, WhatIf

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

SUFFIXES = (".png", ".svg")
# Distinguishable with any kind of colour blindness, and in grey.
RESERVED, ALLOCATED, STRANDED, LIMIT, GOOD = "#bcd4ea", "#2b6ca3", "#f28e2b", "#a01c1c", "#1a7f37"
PANEL_INCHES = (4.6, 2.5)
DOTS_PER_INCH = 110


def draw(result: WhatIf, path: Path) -> None:
    """Write the picture as png or svg; raises UsageError when the file cannot be written."""
    from matplotlib.figure import Figure

    with style():
        columns, rows = grid(result)
        figure = Figure(
            figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows + 1.1), layout="constrained"
        )
        fill(figure, result)
        figure.suptitle(
            f"{sanitize_text(result.name)}, GPU {result.device}: the same allocations under other settings",
            fontsize=12,
        )
        save(figure, path)


def style() -> AbstractContextManager[None]:
    """How all pictures look; the same data give the same file."""
    import matplotlib as mpl

    return mpl.rc_context({"svg.hashsalt": "torchmem", "font.size": 9})


def save(figure: Figure, path: Path) -> None:
    """Write it; raises UsageError when the file cannot be written."""
    try:
        figure.savefig(
            path, dpi=DOTS_PER_INCH, metadata={"Date": None} if path.suffix == ".svg" else None
        )
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): name another file with --plot."
        ) from None


def grid(result: WhatIf) -> tuple[int, int]:
    """Columns and rows of panels."""
    panels = len(_drawn(result))
    columns = 1 if panels == 1 else 2 if panels <= 4 else 3
    return columns, -(-panels // columns)


def fill(figure: FigureBase, result: WhatIf) -> None:
    """Draw the panels of all settings, and the legend below them."""
    outcomes, (columns, rows) = _drawn(result), grid(result)
    panels = (
        figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    )
    for panel, outcome in zip(panels, outcomes, strict=False):
        _panel(panel, result, outcome)
    for panel in panels[len(outcomes) :]:
        panel.remove()
    _frame(figure, panels[: len(outcomes)], result, columns)


def _drawn(result: WhatIf) -> list[ReplayResult]:
    return [outcome for outcome in result.outcomes if outcome.refused is None and outcome.timeline]


def _panel(panel: Axes, result: WhatIf, outcome: ReplayResult) -> None:
    events = [moment.event for moment in outcome.timeline]
    panel.fill_between(events, _gib(outcome, "reserved"), step="post", color=RESERVED, linewidth=0)
    panel.fill_between(
        events, _gib(outcome, "allocated"), step="post", color=ALLOCATED, linewidth=0
    )
    panel.plot(
        events, _gib(outcome, "stranded"), drawstyle="steps-post", color=STRANDED, linewidth=1.4
    )
    if result.card_bytes is not None and _shows_card(result):
        panel.axhline(result.card_bytes / GIB, color=LIMIT, linewidth=1, linestyle="--")
    if outcome.oom is not None:
        _mark_oom(panel, result, outcome.oom)
    recommended = outcome.name == result.verdict.recommended
    title = f"{outcome.name} (recommended)" if recommended else outcome.name
    panel.set_title(
        title, loc="left", fontsize=10, fontweight="bold", color=GOOD if recommended else "black"
    )
    panel.set_title(_numbers(outcome), loc="right", fontsize=8.5)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _mark_oom(panel: Axes, result: WhatIf, oom: FailedRequest) -> None:
    """A cross at the failed request, with its size on the side where there is room."""
    place = oom.event, oom.reserved / GIB
    left = oom.event > result.events / 2
    panel.plot(*place, "X", color=LIMIT, markersize=9, clip_on=False, zorder=5)
    panel.annotate(
        f"OOM asking {format_size(oom.requested)}", place, xytext=(-9 if left else 9, 0), textcoords="offset points",
        ha="right" if left else "left", va="center", fontsize=8.5, color=LIMIT, zorder=5,
        bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1},
    )  # fmt: skip


def _shows_card(result: WhatIf) -> bool:
    """A card far larger than the job would press all curves to the ground."""
    return result.card_bytes is not None and result.card_bytes <= 1.5 * _highest(result)


def _highest(result: WhatIf) -> int:
    return max(outcome.peak_reserved for outcome in result.outcomes)


def _numbers(outcome: ReplayResult) -> str:
    retries = (
        f", {outcome.retries:,} {'retry' if outcome.retries == 1 else 'retries'}"
        if outcome.retries
        else ""
    )
    return f"peak {format_size(outcome.peak_reserved)}{retries}"


def _gib(outcome: ReplayResult, column: str) -> list[float]:
    return [getattr(moment, column) / GIB for moment in outcome.timeline]


def _frame(figure: FigureBase, panels: list[Any], result: WhatIf, columns: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    for number, panel in enumerate(panels):
        panel.set_ylim(
            0,
            1.1
            * max(_highest(result), result.card_bytes or 0 if _shows_card(result) else 0, 1)
            / GIB,
        )
        panel.set_xlim(0, max(1, result.events))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if number % columns == 0:
            panel.set_ylabel("GiB")
        if number >= len(panels) - columns:
            panel.tick_params(labelbottom=True)
            panel.set_xlabel("event of the trace")
    keys: list[Any] = [
        Patch(color=RESERVED, label="reserved"),
        Patch(color=ALLOCATED, label="allocated"),
        Line2D([], [], color=STRANDED, label="stranded (free, but cannot go back to the driver)"),
    ]
    if result.card_bytes is not None:
        keys.append(Line2D([], [], color=LIMIT, linestyle="--", label=_card(result)))
    if any(outcome.oom for outcome in result.outcomes):
        keys.append(
            Line2D([], [], color=LIMIT, marker="X", linestyle="none", label="out of memory")
        )
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)


def _card(result: WhatIf) -> str:
    size = "" if result.card_bytes is None else format_size(result.card_bytes)
    return f"card: {size}" if _shows_card(result) else f"card: {size} (far above)"


def check(path: Path) -> None:
    """Raise UsageError or ModuleNotFoundError for a picture that cannot be drawn, before the replay takes its time."""
    import matplotlib  # noqa: F401, ICN001 - only whether it is there

    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"--plot draws png and svg: name a file that ends in .png or .svg, not {path.name!r}."
        )
    if not path.parent.is_dir():
        raise UsageError(f"--plot: there is no directory {path.parent}; make it first.")
