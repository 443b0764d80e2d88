"""What grows over a run: the only place that judges leaks and steps that need more and more.

The slope is the median of the slopes between all pairs of points (Theil–Sen), which a few odd
points do not move. docs/verdict.md shows how often the judgment is right.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from statistics import median

from torchmem.allocator.outside_memory import unbacked_bytes
from torchmem.sample.run_history import Growth, GrowthKind, RunHistory
from torchmem.sample.sample import DeviceSample

Point = tuple[float, float]
"""Steps that had ended, and bytes."""

MIN_GROWTH_RATIO = 0.05
"""Growth below this share of the GPU does not explain an OutOfMemoryError."""
MIN_LIVE_GROWTH_RATIO = 0.005
"""Growth below this share of the GPU is not reported in a rank that runs: allocators settle."""
MIN_LIVE_STEPS = 20
"""Steps over which memory must have grown in a rank that runs."""
MAX_HORIZON = 100
"""A rank that runs is full within this many times the steps that it has done, or does not grow."""
MAX_STRANDED_SHARE = 0.25
"""The share of what is left that may be stranded, for it to be room for larger steps."""
MIN_STEADY_SHARE = 0.5
"""The share of the growth that the median slope explains; a single jump is explained by less."""
MIN_LATE_SHARE = 0.35
"""The least slope of the last third, as a share of the whole one; settled growth does not go on."""
MIN_POINTS = 4
"""Fewer points show no trend."""
MAX_LIVE_POINTS = 16
"""Points of a rank that runs: 120 pairs, which take a fifth of a millisecond."""
MIN_CONFIDENCE = 4.0
"""Of a rank that runs, in standard deviations of Mann-Kendall's statistic: batches of random sizes
show such a trend once in 30,000 judgments, and a run is judged often."""
MIN_OOM_CONFIDENCE = 2.0
"""The same for a run that ran out of memory, which is judged once and may have had few steps."""
MIN_RISES = 5
"""Of the later half of the points, of which each shows the highest need so far, for steps that need
more and more: random sizes rise as often once in 1,000 judgments. Fewer points all rise."""
FLAT_STEPS = 50
"""Steps over which nothing has grown, after which the growth before them is over."""
MIN_FLAT_POINTS = 3
"""The least points that show it: in a long run, they are further apart."""
WARM_UP_STEPS = 2
"""The first steps allocate gradients, the optimizer's state, and buffers of libraries."""


@dataclass(frozen=True, slots=True)
class SteadyGrowth:
    """A steady growth: bytes a step, the first and the last point, and where it began."""

    slope: float
    first: Point
    last: Point
    since_step: int

    @property
    def grown(self) -> float:
        """The growth between the first point and the last."""
        return self.last[1] - self.first[1]


def after_warm_up(points: Sequence[Point]) -> list[Point]:
    """Return the points after the first steps; all of them without later ones."""
    late = [point for point in points if point[0] >= WARM_UP_STEPS]
    return late or [point for point in points if point[0] > 0] or list(points)


def steady_trend(points: Sequence[Point]) -> SteadyGrowth | None:
    """Return the growth over points in the order of their steps, if it is steady and goes on.

    A single jump is not steady, and a growth that has settled does not go on.
    """
    slope = theil_sen(points)
    if len(points) < MIN_POINTS or slope is None or slope <= 0:
        return None
    first, last = points[0], points[-1]
    trend = SteadyGrowth(slope, first, last, _begin(points))
    explained = slope * (last[0] - first[0])
    late = theil_sen(points[-max(3, len(points) // 3) :])
    goes_on = late is not None and late >= MIN_LATE_SHARE * slope
    is_steady = trend.grown > 0 and explained >= MIN_STEADY_SHARE * trend.grown
    return trend if goes_on and is_steady else None


def theil_sen(points: Sequence[Point]) -> float | None:
    """Return the median of the slopes between all pairs of points; None without two steps."""
    slopes = [
        (high[1] - low[1]) / (high[0] - low[0])
        for low, high in combinations(points, 2)
        if high[0] > low[0]
    ]
    return median(slopes) if slopes else None


def _begin(points: Sequence[Point]) -> int:
    """Return the steps that had ended at the last point before a twentieth of the growth."""
    low, high = points[0][1], points[-1][1]
    early = [step for step, size in points if size <= low + MIN_GROWTH_RATIO * (high - low)]
    return int(early[-1]) if early else int(points[0][0])


def kept_points(history: RunHistory) -> list[Point]:
    """Return what was allocated at steps' ends."""
    return after_warm_up(list(zip(history.steps, history.allocated_bytes, strict=True)))


def peak_points(history: RunHistory) -> list[Point]:
    """Return the highest active bytes so far, at steps' ends."""
    return after_warm_up(list(zip(history.steps, history.peak_bytes, strict=True)))


def outside_points(history: RunHistory) -> list[Point]:
    """Return what was outside the allocator, where it is known."""
    columns = zip(history.steps, history.outside_bytes, strict=True)
    return after_warm_up([(step, size) for step, size in columns if size is not None])


def lasting_jump(points: Sequence[Point]) -> tuple[float, int]:
    """Return the growth at one point that nothing before or after it makes up, and its steps.

    It is at least half of all that the points differ by; otherwise 0, as for noise and for growth.
    """
    sizes = [size for _, size in points]
    if len(sizes) < 2:
        return 0.0, 0
    before, after = list(accumulate(sizes, max)), list(accumulate(reversed(sizes), min))[::-1]
    jumps = [(after[at] - before[at - 1], int(points[at][0])) for at in range(1, len(sizes))]
    jump = max(jumps)
    return jump if jump[0] >= (max(sizes) - min(sizes)) / 2 else (0.0, 0)


def grown_component(history: RunHistory) -> str | None:
    """Return the component that grew most, if it is at least half of the growth."""
    first, last = history.first_components, history.last_components
    if not first or not last:
        return None
    growth = {name: last.get(name, 0) - first.get(name, 0) for name in {*first, *last}}
    name = max(growth, key=lambda name: (growth[name], name))
    total = sum(last.values()) - sum(first.values())
    return name if growth[name] > 0 and growth[name] >= total / 2 else None


def live_growth(history: RunHistory, total: int | None, left: int | None) -> Growth | None:
    """Return what grows in a rank that runs; None if nothing does, or too little to report.

    `total` is the device's memory, and `left` what the growth can still take, in bytes.
    """
    if not total or left is None or not history.steps:
        return None
    found = [growth for growth in _growths(history) if _is_worth(growth, history, total, left)]
    return max(found, key=lambda growth: growth.bytes_per_step, default=None)


def _growths(history: RunHistory) -> Iterator[Growth]:
    component = grown_component(history)
    kept = kept_points(history)
    leak = _certain_trend(kept)
    if leak and not is_flat_now(kept, leak.slope):
        yield _growth("leak", leak, component)
    points = thinned(peak_points(history))
    peaks = steady_trend(points) if keeps_rising(points) else None
    if peaks and (leak is None or peaks.slope > 2 * leak.slope):
        yield _growth("larger_step", peaks, None)
    outside = _certain_trend(outside_points(history))
    if outside:
        yield _growth("outside", outside, None)


def _certain_trend(points: list[Point]) -> SteadyGrowth | None:
    """Return the growth, if values in random order would hardly ever look like it."""
    few = thinned(points)
    return steady_trend(few) if confidence(few) >= MIN_CONFIDENCE else None


def confidence(points: Sequence[Point]) -> float:
    """Return Mann-Kendall's statistic of a trend, in standard deviations; 0 without points."""
    number = len(points)
    if number < MIN_POINTS:
        return 0.0
    signs = sum((high[1] > low[1]) - (high[1] < low[1]) for low, high in combinations(points, 2))
    return signs / math.sqrt(number * (number - 1) * (2 * number + 5) / 18)


def keeps_rising(points: Sequence[Point]) -> bool:
    """Return whether the highest value so far still rises, which is rare for random sizes."""
    later = points[len(points) // 2 :]
    rises = sum(high[1] > low[1] for low, high in pairwise(later))
    return rises >= min(MIN_RISES, len(later) - 1)


def _growth(kind: GrowthKind, trend: SteadyGrowth, component: str | None) -> Growth:
    return Growth(kind, trend.slope, trend.since_step, int(trend.grown), component)


def thinned(points: list[Point]) -> list[Point]:
    """Return at most MAX_LIVE_POINTS, spaced evenly in steps, with the first and the last.

    The first steps of a run are read densely, and would outweigh what happened since.
    """
    if len(points) <= MAX_LIVE_POINTS:
        return points
    steps = [step for step, _ in points]
    pause = (steps[-1] - steps[0]) / (MAX_LIVE_POINTS - 1)
    wanted = (steps[0] + number * pause for number in range(MAX_LIVE_POINTS - 1))
    chosen = dict.fromkeys(bisect_right(steps, step) - 1 for step in wanted)
    return [*(points[index] for index in chosen if index < len(points) - 1), points[-1]]


def is_flat_now(points: Sequence[Point], slope: float) -> bool:
    """Return whether the newest points differ by far less than a growth by `slope` a step."""
    since = points[-1][0] - FLAT_STEPS
    newest = [point for point in points if point[0] >= since]
    newest = newest if len(newest) >= MIN_FLAT_POINTS else list(points[-MIN_FLAT_POINTS:])
    sizes = [size for _, size in newest]
    span = newest[-1][0] - newest[0][0]
    return max(sizes) - min(sizes) < MIN_LATE_SHARE * slope * span


def _is_worth(growth: Growth, history: RunHistory, total: int, left: int) -> bool:
    done = history.steps[-1]
    is_long = done - growth.since_step >= MIN_LIVE_STEPS
    is_near = left <= growth.bytes_per_step * MAX_HORIZON * done
    return is_long and is_near and growth.grown_bytes >= MIN_LIVE_GROWTH_RATIO * total


def steps_left(device: DeviceSample) -> float | None:
    """Return the steps until the growth of a rank fills its GPU; None if that is unknown.

    The peak of a step grows as much as what is kept. If the highest peak is older than the growth,
    as when a checkpoint was loaded, that of a step is unknown. Larger steps need larger tensors,
    which may not fit into memory that is free but stranded.
    """
    growth, left = device.growth, room_left(device)
    if growth is None or left is None or _is_peak_older(device.run_history, growth):
        return None
    stranded = device.layout.stranded_bytes if device.layout else 0
    if growth.kind == "larger_step" and stranded > MAX_STRANDED_SHARE * left:
        return None
    return left / growth.bytes_per_step


def _is_peak_older(history: RunHistory | None, growth: Growth) -> bool:
    """Return whether the highest peak has not risen while more was kept."""
    if history is None or growth.kind != "leak":
        return False
    points = zip(history.steps, history.peak_bytes, strict=True)
    peaks = [peak for step, peak in points if step >= growth.since_step]
    return len(peaks) >= MIN_POINTS and peaks[0] == peaks[-1]


def room_left(device: DeviceSample) -> int | None:
    """Return the bytes that the active memory can still grow by, from its peak; None if unknown."""
    allocator, free, limit = device.allocator, device.driver_free_bytes, device.limit_bytes
    if allocator is None or free is None or allocator.active_peak_bytes is None:
        return None
    if unbacked_bytes(device, free) is not None:
        return None
    most = allocator.reserved_bytes.total + free
    return max(0, (most if limit is None else min(most, limit)) - allocator.active_peak_bytes)
