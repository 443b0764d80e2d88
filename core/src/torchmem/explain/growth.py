"""The judge of growth: whether a series of bytes grows from step to step, how fast, since when.

Ranks that run, OutOfMemoryErrors, preflights, lines of a recording and the start of one differ in
the `Evidence` that they ask for, and in nothing else. docs/verdict.md shows how often the judgment
is right.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from statistics import median

from torchmem.allocator.outside_memory import unbacked_bytes
from torchmem.sample.run_history import NEWEST_POINTS, Growth, GrowthKind, RunHistory
from torchmem.sample.sample import DeviceSample

Point = tuple[float, float]
"""Steps that had ended, or seconds, and bytes."""

MIN_LIVE_GROWTH_RATIO = 0.005
"""Growth below this share of the GPU is not reported in a rank that runs: allocators settle."""
MIN_RISE_RATIO = 0.001
"""Growth below this share of the GPU is noise."""
MIN_LIVE_STEPS = 20
"""Steps over which memory must have grown in a rank that runs."""
MAX_FULL_RATIO = 0.01
"""Memory was full if less than this share of the GPU was left at the highest peak."""
MAX_HORIZON = 100
"""Memory is full within this many times the steps that were done, or does not grow."""
SOON_STEPS = 300
SOON_SECONDS = 3600.0
"""Memory is used up soon if that takes fewer steps, or less time."""
MAX_STRANDED_SHARE = 0.25
"""The share of what is left that may be stranded, for it to be room for larger steps."""
MIN_ROOM_RATIO = 0.03
"""With less room than this share of the GPU, the steps left are unknown: pieces of the cache that
no tensor fits into take up to 1%, so that they would be off by half."""
MIN_STEADY_SHARE = 0.5
"""The share of the growth that the median slope explains; a single jump is explained by less."""
MIN_LATE_SHARE = 0.35
"""The least slope of the last third, as a share of the whole one; settled growth does not go on."""
MIN_BEGIN_SHARE = 0.05
"""The share of the growth at which it has begun."""
MIN_POINTS = 4
"""Fewer points show no trend."""
MAX_JUDGED_POINTS = 48
"""Points of a whole series that are judged, which takes about two milliseconds."""
PEAK_POINTS = 16
"""Points of the highest needs so far, whose newest rises must span a good part of the run."""
MIN_PIECE_POINTS = 2
"""The fewest points of a piece."""
PIECE_PRICE = 4.0
"""The price of a piece: this many times the variance of the noise and the logarithm of the points.
A piece has three parameters, its line and its start, and BIC asks for one logarithm for each."""
NOISE_RATIO = 0.01
"""Deviations below this share of a series' range are not noise that matters."""
MAX_UNEVENNESS = 2.5
"""How many times a jump of stairs, or the time between two, may be the typical one."""
MIN_STAIRS_SHARE = 0.7
"""The share of the rise that jumps explain, for it to be stairs."""
MIN_RISE_SHARE = 0.1
"""The share of a growth that an earlier rise has at least, to be compared with it."""
MIN_LOWS = 5
"""Falls of a saw whose lows show a trend."""
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
        stairs: jumps of similar sizes, at similar distances, that are stairs.
        stages: whether the highest values so far may rise in stairs; random ones often seem to.
    """

    confidence: float = 0.0
    few: bool = False
    rises: int = 0
    of: int = 0
    points: int = MIN_POINTS
    stairs: int = 3
    stages: bool = False


JUDGED_OFTEN = Evidence(confidence=4.0)
"""For a rank that runs: batches of random sizes show it once in 30,000 judgments."""
JUDGED_ONCE = Evidence(confidence=2.0, stages=True)
"""For a run that is over, which may have had few steps."""
LEAKS_FOR_SURE = Evidence(confidence=4.0, stairs=5)
"""For a leak in a rank that runs: layers may be unfrozen in three or four stages."""
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
    """Return what grows now over points in the order of their steps; None if nothing does.

    The whole series is judged, and its newest points, which show what has begun lately. Growth goes
    beyond every level before it.
    """
    series = [thinned(points)]
    if len(points) > NEWEST_POINTS:
        series.append(points[_rising_until(points, len(points) - NEWEST_POINTS) :])
    rises = [_rise(each, points, evidence) for each in series]
    found = [rise for rise in rises if rise and not _is_flat_now(points, rise)]
    if not found:
        return None
    most = max(found, key=lambda rise: rise.bytes)
    return Growth(kind, most.slope, int(most.since), int(most.bytes), component)


@dataclass(frozen=True, slots=True)
class _Rise:
    """What goes on rising: its pace, the step at which it began, and how far it has risen.

    `pause`: the steps between two rises of stairs; 0 for a ramp.
    """

    slope: float
    since: float
    bytes: float
    pause: float = 0.0


def _rise(series: Sequence[Point], points: Sequence[Point], evidence: Evidence) -> _Rise | None:
    """Return what rises in the last piece of a series, above the level of all points before."""
    if len(series) < evidence.points or not _rises(series, evidence):
        return None
    starts = pieces(series)
    found = (
        _stairs(series, starts, evidence)
        or _ramp(series, starts, evidence)
        or _lows(series, starts, evidence)
    )
    if found is None:
        return None
    level = max((size for step, size in points if step < found.since), default=-math.inf)
    risen = min(found.bytes, points[-1][1] - level)
    return replace(found, bytes=risen) if risen > 0 else None


def _rising_until(points: Sequence[Point], start: int) -> int:
    """Return the first of the points that rise without a break to the one at `start`.

    The points before the newest ones are far apart: what has begun between them goes back there.
    """
    pace = (points[-1][1] - points[start][1]) / max(1.0, points[-1][0] - points[start][0])
    while start > 0:
        risen = points[start][1] - points[start - 1][1]
        if pace <= 0 or risen < MIN_LATE_SHARE * pace * (points[start][0] - points[start - 1][0]):
            break
        start -= 1
    return start


def _ramp(points: Sequence[Point], starts: Sequence[int], evidence: Evidence) -> _Rise | None:
    """Return the steady rise that leads to the end, by the median slope of its pairs of points.

    A few odd points do not move that slope (Theil–Sen). A single jump is not steady, and a rise
    that has settled does not go on. A rise that gets faster began where it was slow, and has the
    slope of its end.
    """
    rise = points[_rising_since(points, starts, MIN_BEGIN_SHARE) :]
    slopes = _slopes(rise) if len(rise) >= evidence.points else []
    if not slopes or not _is_certain(len(rise), slopes, evidence):
        return None
    end = points[_rising_since(points, starts, MIN_LATE_SHARE) :]
    slope = theil_sen(end) or 0.0
    is_steady = slope * (end[-1][0] - end[0][0]) >= MIN_STEADY_SHARE * (end[-1][1] - end[0][1]) > 0
    if not is_steady or not _goes_on(end, slope):
        return None
    return _Rise(slope, _begin(rise), rise[-1][1] - rise[0][1])


def _rising_since(points: Sequence[Point], starts: Sequence[int], share: float) -> int:
    """Return the start of the last piece, or of the rising pieces that lead to it.

    Each has at least this share of the pace of those after it, and none begins far below the end
    of the one before.
    """
    ends = [*starts[1:], len(points)]
    since = starts[-1]
    for start, end in reversed(list(zip(starts[:-1], ends[:-1], strict=True))):
        risen = points[end - 1][1] - points[start][1]
        falls = points[end][1] < points[end - 1][1] - risen / 2
        pace = risen / max(1.0, points[end - 1][0] - points[start][0])
        later = (points[-1][1] - points[since][1]) / max(1.0, points[-1][0] - points[since][0])
        if risen <= 0 or falls or pace < share * later:
            break
        since = start
    return since


def _stairs(points: Sequence[Point], starts: Sequence[int], evidence: Evidence) -> _Rise | None:
    """Return the rise of a series that jumps up by similar sizes, at similar distances."""
    jumps = [(points[start][0], points[start][1] - points[start - 1][1]) for start in starts[1:]]
    if len(jumps) < evidence.stairs or min(size for _, size in jumps) <= 0:
        return None
    typical, risen = median(size for _, size in jumps), points[-1][1] - points[0][1]
    pauses = [late[0] - early[0] for early, late in pairwise(jumps)]
    pause = median(pauses)
    is_regular = (
        all(typical / MAX_UNEVENNESS <= size <= typical * MAX_UNEVENNESS for _, size in jumps)
        and max(pauses) <= MAX_UNEVENNESS * pause
    )
    treads = ([size for _, size in points[a:b]] for a, b in pairwise([*starts, len(points)]))
    is_flat = all(max(tread) - min(tread) <= typical / 2 for tread in treads)
    is_all = sum(size for _, size in jumps) >= MIN_STAIRS_SHARE * risen
    goes_on = points[-1][0] - jumps[-1][0] <= MAX_UNEVENNESS * pause
    if not (is_regular and is_flat and is_all and goes_on and risen > 0):
        return None
    return _Rise(typical / pause, max(points[0][0], jumps[0][0] - pause), risen, pause)


def _lows(points: Sequence[Point], starts: Sequence[int], evidence: Evidence) -> _Rise | None:
    """Return the rise of what is left after each fall, where memory is freed now and then."""
    falls = [start for start in starts[1:] if points[start][1] < points[start - 1][1]]
    lows = [points[start] for start in falls]
    if len(lows) < MIN_LOWS:
        return None
    slopes = _slopes(lows)
    if not _is_certain(len(lows), slopes, replace(evidence, few=True)):
        return None
    slope, risen = median(slopes), lows[-1][1] - lows[0][1]
    return _Rise(slope, lows[0][0], risen) if risen > 0 and _goes_on(lows, slope) else None


def pieces(points: Sequence[Point]) -> list[int]:
    """Return the indices at which the pieces of a series begin, which are straight lines.

    They are the pieces with the least squared distances, where each piece has a price of the
    order of the series' own noise (optimal partitioning, Jackson et al., IEEE Signal Processing
    Letters 12, 2005).
    """
    number = len(points)
    cost, price = _line_costs(points), PIECE_PRICE * math.log(max(2, number)) * _noise(points) ** 2
    # The first piece is free.
    best, start_of = [-price, *[math.inf] * number], [0] * (number + 1)
    for end in range(1, number + 1):
        for start in range(max(1, end - MIN_PIECE_POINTS + 1)):
            total = best[start] + cost(start, end) + price
            if total < best[end]:
                best[end], start_of[end] = total, start
    starts = [start_of[number]]
    while starts[0]:
        starts.insert(0, start_of[starts[0]])
    return starts


def _line_costs(points: Sequence[Point]) -> Callable[[int, int], float]:
    """Return the function that gives the squared distances from the line through points[i:j]."""
    # Sums of squares lose their last digits unless they begin near zero.
    first_x, first_y = points[0]
    x = [step - first_x for step, _ in points]
    y = [size - first_y for _, size in points]
    products = [[a * b for a, b in zip(*two, strict=True)] for two in ((x, x), (x, y), (y, y))]
    sums = [list(accumulate(values, initial=0.0)) for values in (x, y, *products)]

    def cost(start: int, end: int) -> float:
        sx, sy, sxx, sxy, syy = (column[end] - column[start] for column in sums)
        number = end - start
        xx, xy, yy = sxx - sx * sx / number, sxy - sx * sy / number, syy - sy * sy / number
        return max(0.0, yy - xy * xy / xx) if xx > 0 else max(0.0, yy)

    return cost


def _noise(points: Sequence[Point]) -> float:
    """Return the standard deviation around lines, by the changes of neighbors' differences.

    Their first quartile, because stairs have many changes: that of a normal distribution is 0.3186
    standard deviations, and three values, one of them twice, have the variance of six. It is at
    least NOISE_RATIO of the range, as smaller deviations do not matter.
    """
    sizes = [size for _, size in points]
    bends = sorted(abs(a - 2 * b + c) for a, b, c in zip(sizes, sizes[1:], sizes[2:], strict=False))
    deviation = bends[len(bends) // 4] / (0.3186 * math.sqrt(6)) if bends else 0.0
    return max(deviation, NOISE_RATIO * (max(sizes) - min(sizes)) or 1.0)


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
    # The standard deviation of the sum of signs in random order, without ties.
    deviation = math.sqrt(number * (number - 1) * (2 * number + 5) / 18)
    return (evidence.few and signs == len(slopes)) or signs >= evidence.confidence * deviation


def _goes_on(points: Sequence[Point], slope: float) -> bool:
    late = theil_sen(points[-max(3, len(points) // 3) :])
    return late is not None and late >= MIN_LATE_SHARE * slope


def _is_flat_now(points: Sequence[Point], rise: _Rise) -> bool:
    """Return whether the newest points differ by far less than by the pace of a rise."""
    since = points[-1][0] - max(FLAT_STEPS, MAX_UNEVENNESS * rise.pause)
    newest = [point for point in points if point[0] >= since]
    newest = newest if len(newest) >= MIN_FLAT_POINTS else list(points[-MIN_FLAT_POINTS:])
    sizes = [size for _, size in newest]
    span = newest[-1][0] - newest[0][0]
    return max(sizes) - min(sizes) < MIN_LATE_SHARE * rise.slope * span


def _begin(points: Sequence[Point]) -> int:
    """Return the steps that had ended at the last point before a twentieth of the growth."""
    low, high = points[0][1], points[-1][1]
    early = [step for step, size in points if size <= low + MIN_BEGIN_SHARE * (high - low)]
    return int(early[-1]) if early else int(points[0][0])


def thinned(points: Sequence[Point], most: int = MAX_JUDGED_POINTS) -> Sequence[Point]:
    """Return at most this many points, spaced evenly in steps, with the first and the last.

    The first steps of a run are read densely, and would outweigh what happened since.
    """
    if len(points) <= most:
        return points
    steps = [step for step, _ in points]
    pause = (steps[-1] - steps[0]) / (most - 1)
    wanted = (steps[0] + number * pause for number in range(most - 1))
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
    """Return what grows from step to step in a run, by what it keeps and by its peaks.

    What is allocated at steps' ends may grow while the parts that are kept do not. Then it is what
    steps need.
    """
    kept = judge_growth("kept", kept_points(history), evidence, grown_component(history))
    peaks = peak_points(history)
    needed = judge_growth("larger_step", thinned(peaks, PEAK_POINTS), HIGHEST_NEEDS)
    if needed is None and evidence.stages:
        needed = _stairs_of_needs(peaks)
    if kept and _parts_are_flat(history, kept):
        return needed or replace(kept, kind="larger_step", component=None)
    return of_steps(kept, needed)


def _stairs_of_needs(peaks: Sequence[Point]) -> Growth | None:
    """Return the growth of what steps need in stages, by the highest peaks so far.

    Where each stage is larger by a factor, the first ones are small and not regular.
    """
    series = thinned(peaks)
    starts = pieces(series) if len(series) >= MIN_POINTS else []
    for number, start in enumerate(starts):
        later = [index - start for index in starts[number:]]
        # Peaks of random lengths rise often at first, and then in a few regular steps.
        evidence = JUDGED_ONCE if number == 0 else LEAKS_FOR_SURE
        rise = _stairs(series[start:], later, evidence)
        if rise and not _is_flat_now(peaks, rise):
            return Growth("larger_step", rise.slope, int(rise.since), int(rise.bytes))
    return None


def _parts_are_flat(history: RunHistory, growth: Growth) -> bool:
    """Return whether the parts that are kept have grown by far less than what was allocated.

    Both at the same steps' ends, those during the growth at which the components were read.
    """
    rows = zip(history.steps, history.allocated_bytes, history.kept_bytes, strict=True)
    known = [
        (size, kept) for step, size, kept in rows if step >= growth.since_step and kept is not None
    ]
    if len(known) < MIN_POINTS:
        return False
    (first, kept_first), (last, kept_last) = known[0], known[-1]
    return kept_last - kept_first < (last - first) / 2


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
    if not total or left is None or not _has_risen(history, MIN_LIVE_GROWTH_RATIO * total):
        return None
    recent = _since_full(history, total, left)
    found = (
        growth_of_steps(recent, JUDGED_OFTEN),
        judge_growth("outside", outside_points(recent), JUDGED_OFTEN),
    )
    told = [growth for growth in found if growth and _is_worth(growth, history, total, left)]
    if not told:
        return None
    most = max(told, key=lambda growth: growth.bytes_per_step)
    return replace(most, is_leak=_is_leak(most, history, left))


def _has_risen(history: RunHistory, least: float) -> bool:
    """Return whether anything is this much above its lowest point; most runs are judged by that."""
    columns = kept_points(history), peak_points(history), outside_points(history)
    return any(
        points[-1][1] - min(size for _, size in points) >= least for points in columns if points
    )


def _since_full(history: RunHistory, total: int, left: int) -> RunHistory:
    """Return the history since memory was full, if it was and the run went on.

    What was kept before a caught OutOfMemoryError does not show what is healthy.
    """
    highest = history.peak_bytes[-1]
    start = history.peak_bytes.index(highest) + 1
    if left > MAX_FULL_RATIO * total or len(history.steps) - start < MIN_POINTS:
        return history
    columns = {name: getattr(history, name)[start:] for name in history.columns}
    return replace(history, **columns)


def _is_leak(growth: Growth, history: RunHistory, left: int) -> bool:
    """Return whether what is kept leaks: nothing healthy that the run has shown explains it.

    It is above every level before, has lasted longer than every earlier rise that ended by itself,
    and has taken half of the room that there was: a cache with a bound is given less.
    """
    if growth.kind != "kept" or growth.grown_bytes < left:
        return False
    points = kept_points(history)
    if judge_growth("kept", points, LEAKS_FOR_SURE) is None:
        return False
    earlier = [point for point in points if point[0] <= growth.since_step]
    lasted = history.steps[-1] - growth.since_step
    return lasted > _longest_rise(thinned(earlier), growth.grown_bytes * MIN_RISE_SHARE)


def _longest_rise(points: Sequence[Point], least: float) -> float:
    """Return the steps of the longest piece that rises by at least this many bytes."""
    if len(points) < MIN_PIECE_POINTS:
        return 0.0
    starts = pieces(points)
    spans = ((points[a], points[b - 1]) for a, b in pairwise([*starts, len(points)]))
    return max(
        (last[0] - first[0] for first, last in spans if last[1] - first[1] >= least), default=0.0
    )


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
    which may not fit into memory that is free but stranded. Of little room, the cache's pieces that
    no tensor fits into are too large a share.
    """
    growth, left = device.growth, room_left(device)
    if growth is None or left is None or _is_peak_older(device.run_history, growth):
        return None
    if left < MIN_ROOM_RATIO * (device.total_bytes or 0):
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
    if device.shares_host_memory or unbacked_bytes(device, free) is not None:
        return None
    most = allocator.reserved_bytes.total + free
    return max(0, (most if limit is None else min(most, limit)) - allocator.active_peak_bytes)
