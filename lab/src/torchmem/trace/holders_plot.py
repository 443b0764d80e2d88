"""The bytes in use over a recording, stacked by line. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torchmem.allocator.sizes import GIB
from torchmem.output.plots import LIMIT, save, style
from torchmem.sample.untrusted import sanitize_text
from torchmem.trace.holders import HolderLine, Holders, LineFinder
from torchmem.trace.lifetimes import BEFORE, Lifetimes

MAX_LINES = 8
MAX_POINTS = 2000
MAX_LABEL = 60
OTHERS = "other lines"
# Okabe and Ito's colors, which people with any kind of color blindness can tell apart, and grays.
COLORS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#000000",
    "#8c8c8c",
)


def draw(lifetimes: Lifetimes, found: Holders, path: Path) -> None:
    """Write the plot as png or svg, with the moment marked. Raise UsageError if that fails."""
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(12, 5), layout="constrained")
        axes = figure.subplots()
        points = _points(lifetimes.events)
        curves = series(lifetimes, points)
        axes.stackplot(
            points,
            [[size / GIB for size in sizes] for _, sizes in curves],
            labels=[label[-MAX_LABEL:] for label, _ in curves],
            colors=COLORS,
            step="post",
        )
        axes.axvline(found.moment, color=LIMIT, linestyle="--", linewidth=1, label=found.at)
        axes.set(xlabel="event", ylabel="requested GiB", xlim=(0, max(1, lifetimes.events)))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7, reverse=True)
        axes.set_title(f"{sanitize_text(found.name)}, cuda:{found.device}: memory in use by line")
        save(figure, path)


def series(lifetimes: Lifetimes, points: list[int]) -> list[tuple[str, list[int]]]:
    """Return the bytes in use before each of `points` by line.

    The lines that hold most over the whole recording have their own series; the others share one.
    """
    lines = LineFinder(lifetimes)
    held: dict[HolderLine, int] = {}
    for size, stack, start, end in _rows(lifetimes):
        line = lines.line(stack, is_before=start == BEFORE)
        held[line] = held.get(line, 0) + size * (end - start)
    top = sorted(held, key=lambda line: -held[line])[:MAX_LINES]
    changes: dict[HolderLine | None, list[int]] = {
        line: [0] * (lifetimes.events + 2) for line in (*top, None)
    }
    for size, stack, start, end in _rows(lifetimes):
        line = lines.line(stack, is_before=start == BEFORE)
        change = changes[line if line in changes else None]
        change[start + 1] += size
        change[end + 1] -= size
    return [
        (sanitize_text(line.text) if line else OTHERS, _at(points, change))
        for line, change in changes.items()
    ]


def _rows(lifetimes: Lifetimes) -> Iterator[tuple[int, int, int, int]]:
    """Yield size, stack, start and end of every allocation."""
    columns = lifetimes.sizes, lifetimes.stacks, lifetimes.starts, lifetimes.ends
    return zip(*columns, strict=True)


def _points(events: int) -> list[int]:
    step = max(1, -(-events // MAX_POINTS))
    return [*range(0, events, step), events]


def _at(points: list[int], changes: list[int]) -> list[int]:
    """Return the sums of the changes up to each point."""
    values, total, done = [], 0, 0
    for point in points:
        total += sum(changes[done : point + 1])
        done = point + 1
        values.append(total)
    return values
