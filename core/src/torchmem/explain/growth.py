"""The judge of growth: whether a series of bytes grows from step to step, how fast, since when.

Ranks that run, OutOfMemoryErrors, preflights, lines of a recording and the start of one differ in
the `Evidence` that they ask for, and in nothing else. docs/verdict.md shows how often the judgment
is right.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from statistics import median

from torchmem.allocator.outside_memory import unbacked_bytes
from torchmem.sample.run_history import Growth, GrowthKind, RunHistory
from torchmem.sample.sample import DeviceSample

Point = tuple[float, float]
"""Steps that had ended, or seconds, and bytes."""

MIN_GROWTH_RATIO = 0.05
"""Growth below this share of the GPU does not explain an OutOfMemoryError."""
MIN_LIVE_GROWTH_RATIO = 0.005
"""Growth below this share of the GPU is not reported in a rank that runs: allocators settle."""
MIN_RISE_RATIO = 0.001
"""Growth below this share of the GPU is noise."""
MIN_LIVE_STEPS = 20
"""Steps over which memory must have grown in a rank that runs."""
MAX_HORIZON = 100
"""Memory is full within this many times the steps that were done, or does not grow."""
SOON_STEPS = 300
SOON_SECONDS = 3600.0
"""Memory is used up soon if that takes fewer steps, or less time."""
MAX_STRANDED_SHARE = 0.25
"""The share of what is left that may be stranded, for it to be room for larger steps."""
MIN_STEADY_SHARE = 0.5
"""The share of the growth that the median slope explains; a single jump is explained by less."""
MIN_LATE_SHARE = 0.35
"""The least slope of the last third, as a share of the whole one; settled growth does not go on."""
MIN_BEGIN_SHARE = 0.05
"""The share of the growth at which it has begun."""
MIN_POINTS = 4
"""Fewer points show no trend."""
MAX_JUDGED_POINTS = 16
"""Points that are judged: 120 pairs, which take a fifth of a millisecond."""
FLAT_STEPS = 50
"""Steps over which nothing has grown, after which the growth before them is over."""
MIN_FLAT_POINTS = 3
"""The least points that show it: in a long run, they are further apart."""
WARM_UP_STEPS = 2
"""The first steps allocate gradients, the optimizer's state, and buffers of libraries."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """How clearly a series must rise before its growth is told.

    Attributes:
        confidence: in standard deviations of Mann-Kendall's statistic.
        few: whether points that all rise are enough, however few.
        rises: of the newest `of` pairs of neighbors, those that rise; all of fewer pairs.
        points: fewer points show nothing.
    """

    confidence: float = 0.0
    few: bool = False
    rises: int = 0
    of: int = 0
    points: int = MIN_POINTS


JUDGED_OFTEN = Evidence(confidence=4.0)
"""For a rank that runs: batches of random sizes show it once in 30,000 judgments."""
JUDGED_ONCE = Evidence(confidence=2.0)
"""For a run that is over, which may have had few steps."""
MEASURED_EXACTLY = Evidence(confidence=3.1, few=True)
"""Where nothing is missed, as in a preflight or in a recording of all events."""
HIGHEST_NEEDS = Evidence(rises=5, of=7)
"""For the highest values so far: those of random sizes rise as often once in 1,000 judgments."""
SUSPICION = Evidence(rises=7, of=10, points=6)
"""For the start of a recording with a bounded cost, by the newest reads: five random values are in
the order of their sizes once in 120 times, and hardly ever after more reads."""


def judge_growth(
    kind: GrowthKind, points: Sequence[Point], evidence: Evidence, component: str | None = None
) -> Growth | None:
    """Return the growth over points in the order of their steps, if it is steady and goes on.

    Its pace is the median of the slopes between all pairs of points (Theil–Sen), which a few odd
    points do not move. A single jump is not steady, and a growth that has settled does not go on.
    """
    few = thinned(points)
    if len(few) < evidence.points or not _rises(few, evidence):
        return None
    slopes = _slopes(few)
    if not slopes or not _is_certain(len(few), slopes, evidence):
        return None
    slope, grown = median(slopes), few[-1][1] - few[0][1]
    is_steady = slope * (few[-1][0] - few[0][0]) >= MIN_STEADY_SHARE * grown > 0
    if not is_steady or not _goes_on(few, slope) or _is_flat_now(points, slope):
        return None
    return Growth(kind, slope, _begin(points), int(grown), component)


def theil_sen(points: Sequence[Point]) -> float | None:
    """Return the median of the slopes between all pairs of points; None without two steps."""
    slopes = _slopes(points)
    return median(slopes) if slopes else None


def _slopes(points: Sequence[Point]) -> list[float]:
    return [
        (high[1] - low[1]) / (high[0] - low[0])
        for low, high in combinations(points, 2)
        if high[0] > low[0]
    ]


def _rises(points: Sequence[Point], evidence: Evidence) -> bool:
    newest = points[-evidence.of - 1 :]
    rises = sum(high[1] > low[1] for low, high in pairwise(newest))
    return rises >= min(evidence.rises, len(newest) - 1)


def _is_certain(number: int, slopes: Sequence[float], evidence: Evidence) -> bool:
    """Return whether values in random order would hardly ever rise like these, by Mann-Kendall."""
    signs = sum((slope > 0) - (slope < 0) for slope in slopes)
    deviation = math.sqrt(number * (number - 1) * (2 * number + 5) / 18)
    return (evidence.few and signs == len(slopes)) or signs >= evidence.confidence * deviation


def _goes_on(points: Sequence[Point], slope: float) -> bool:
    late = theil_sen(points[-max(3, len(points) // 3) :])
    return late is not None and late >= MIN_LATE_SHARE * slope


def _is_flat_now(points: Sequence[Point], slope: float) -> bool:
    """Return whether the newest points differ by far less than a growth by `slope` a step."""
    since = points[-1][0] - FLAT_STEPS
    newest = [point for point in points if point[0] >= since]
    newest = newest if len(newest) >= MIN_FLAT_POINTS else list(points[-MIN_FLAT_POINTS:])
    sizes = [size for _, size in newest]
    span = newest[-1][0] - newest[0][0]
    return max(sizes) - min(sizes) < MIN_LATE_SHARE * slope * span


def _begin(points: Sequence[Point]) -> int:
    """Return the steps that had ended at the last point before a twentieth of the growth."""
    low, high = points[0][1], points[-1][1]
    early = [step for step, size in points if size <= low + MIN_BEGIN_SHARE * (high - low)]
    return int(early[-1]) if early else int(points[0][0])


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return at most MAX_JUDGED_POINTS, spaced evenly in steps, with the first and the last.

    The first steps of a run are read densely, and would outweigh what happened since.
    """
    if len(points) <= MAX_JUDGED_POINTS:
        return points
    steps = [step for step, _ in points]
    pause = (steps[-1] - steps[0]) / (MAX_JUDGED_POINTS - 1)
    wanted = (steps[0] + number * pause for number in range(MAX_JUDGED_POINTS - 1))
    chosen = dict.fromkeys(bisect_right(steps, step) - 1 for step in wanted)
    return [*(points[index] for index in chosen if index < len(points) - 1), points[-1]]


def of_steps(leak: Growth | None, larger_step: Growth | None) -> Growth | None:
    """Return what grows: what is kept between steps, or what they need, if that is far more.

    A step needs at its peak what is kept, so that the peaks grow with a leak.
    """
    if larger_step and (leak is None or larger_step.bytes_per_step > 2 * leak.bytes_per_step):
        return larger_step
    return leak


def growth_of_steps(history: RunHistory, evidence: Evidence) -> Growth | None:
    """Return what grows from step to step in a run, by what it keeps and by its peaks."""
    leak = judge_growth("kept", kept_points(history), evidence, grown_component(history))
    return of_steps(leak, judge_growth("larger_step", peak_points(history), HIGHEST_NEEDS))


def after_warm_up(points: Sequence[Point]) -> list[Point]:
    """Return the points after the first steps; all of them without later ones."""
    late = [point for point in points if point[0] >= WARM_UP_STEPS]
    return late or [point for point in points if point[0] > 0] or list(points)


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
    found = (
        growth_of_steps(history, JUDGED_OFTEN),
        judge_growth("outside", outside_points(history), JUDGED_OFTEN),
    )
    told = [growth for growth in found if growth and _is_worth(growth, history, total, left)]
    most = max(told, key=lambda growth: growth.bytes_per_step, default=None)
    return most and replace(most, is_leak=most.kind == "kept")


def is_known(history: RunHistory) -> bool:
    """Return whether growth would have shown in a rank that runs."""
    points = kept_points(history)
    return len(points) >= MIN_POINTS and points[-1][0] - points[0][0] >= MIN_LIVE_STEPS


def _is_worth(growth: Growth, history: RunHistory, total: int, left: int) -> bool:
    done = history.steps[-1]
    is_long = done - growth.since_step >= MIN_LIVE_STEPS
    is_near = left <= growth.bytes_per_step * MAX_HORIZON * done
    return is_long and is_near and growth.grown_bytes >= MIN_LIVE_GROWTH_RATIO * total


def is_soon(steps_left: float, seconds_per_step: float) -> bool:
    """Return whether this many more steps count as soon."""
    return steps_left < SOON_STEPS or steps_left * seconds_per_step < SOON_SECONDS


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
    if history is None or growth.kind != "kept":
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
