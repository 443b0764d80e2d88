"""The chart of a run: its memory over the steps, from the history that the process keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torchmem.sample.run_history import RunHistory

_MIN_POINTS = 2


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line; `color` is a part's name in the table of colors, or a property of the page."""

    label: str
    color: str
    values: tuple[int | None, ...]
    fill: bool = False
    dash: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """What the page's code draws.

    Attributes:
        unit: what `x` counts: steps, seconds since the first point, or seconds before the end.
        total: the memory of the GPU.
        oom: whether the last point is an OutOfMemoryError.
    """

    title: str
    unit: Literal["steps", "seconds", "before"]
    x: tuple[float, ...]
    lines: tuple[ChartLine, ...]
    total: int | None
    oom: bool = False


@dataclass(frozen=True, slots=True)
class OomMoment:
    """What was known when a request failed; `step` is the one that ran."""

    step: int
    allocated: int | None
    peak: int | None
    stranded: int | None
    outside: int | None


def run_chart(
    history: RunHistory | None, total: int | None, oom: OomMoment | None = None
) -> Chart | None:
    """Return the chart of a whole run, with its OOM as the last point; None without a history.

    It is over steps, or over seconds where the history has no steps.
    """
    if history is None or not history.is_consistent or not history.steps:
        return None
    has_steps = history.steps[-1] > history.steps[0]
    x: tuple[float, ...] = history.steps if has_steps else history.seconds
    if oom is not None:
        x = (*x, max(oom.step, x[-1]) if has_steps else x[-1])
    if len(x) < _MIN_POINTS:
        return None
    unit: Literal["steps", "seconds"] = "steps" if has_steps else "seconds"
    return Chart("Memory over the run", unit, x, lines(_columns(history, oom)), total, bool(oom))


def _columns(history: RunHistory, oom: OomMoment | None) -> list[ChartLine]:
    last = oom and (
        oom.allocated,
        max(history.peak_bytes[-1], oom.peak or 0),
        oom.stranded,
        oom.outside,
    )
    columns = (
        history.allocated_bytes,
        history.peak_bytes,
        history.stranded_bytes,
        history.outside_bytes,
    )
    values = [
        (*column, *last[at : at + 1]) if last else column for at, column in enumerate(columns)
    ]
    return [
        ChartLine("allocated", "in_use", values[0], fill=True),
        ChartLine("peak so far", "--ink", values[1], dash=True),
        ChartLine("stranded", "stranded", values[2]),
        ChartLine("outside PyTorch", "not_pytorch", values[3]),
    ]


def lines(found: Iterable[ChartLine]) -> tuple[ChartLine, ...]:
    """Return the lines that have a value other than 0."""
    return tuple(line for line in found if any(line.values))
