"""Memory that grows from step to step in a run, and the steps until the GPU is full.

The judge is that of `torchmem.explain.growth`. A preflight has fewer steps than a rank that runs,
but measures the end and the peak of each exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmem.explain.growth import (
    MAX_HORIZON,
    MEASURED_EXACTLY,
    MIN_POINTS,
    judge_growth,
    of_steps,
    theil_sen,
    thinned,
)
from torchmem.preflight.result import GpuMemory, RunResult, StepMemory
from torchmem.sample.run_history import Growth, GrowthKind

MAX_WASTE = 1.5
"""Reserved bytes for each allocated one at most, in the long run: two blocks of a third of a
segment and a little more leave the last third."""
MIN_GROWTH_RATIO = 0.05
"""Growth below this share of the GPU within the horizon does not decide."""


@dataclass(frozen=True, slots=True)
class GpuGrowth:
    """What grows on one GPU, by `bytes_per_step`.

    kind: what is kept between steps (kept), or what a step needs beside it (larger_step).
    steps_left: further steps until the GPU is full, about. decides: whether that is soon enough,
    as in a rank that runs, to count as a run that does not fit.
    """

    device: int
    kind: GrowthKind
    bytes_per_step: int
    steps_left: int
    decides: bool


def kept_per_step(steps: Sequence[StepMemory]) -> int | None:
    """Return the bytes per step by which the memory kept between steps grows.

    Returns 0 if it does not grow and None if there are too few steps.
    """
    return _per_step(steps, _kept(steps))


def needed_per_step(steps: Sequence[StepMemory]) -> int | None:
    """Return the same for the peaks of steps."""
    return _per_step(steps, _needed(steps))


def growth(
    device: GpuMemory, total: int, taken: int, *, is_whole: bool = False
) -> GpuGrowth | None:
    """Return what grows on a GPU with `total` bytes; None if nothing does.

    taken: bytes that were taken at the peak, with the cache, in which a leak finds little room.
    is_whole: the run ended by itself, so that no further steps follow.
    """
    found = of_steps(_kept(device.steps), _needed(device.steps))
    per_step = round(found.bytes_per_step) if found else 0
    if found is None or not per_step:
        return None
    used = max(taken, device.outside + _coming_peak(device.steps, per_step))
    left = int(max(0, total - used) / _taken_per_step(device.steps, per_step))
    horizon = MAX_HORIZON * device.steps[-1].step
    is_near = left <= horizon and per_step * horizon >= MIN_GROWTH_RATIO * total
    return GpuGrowth(device.device, found.kind, per_step, left, is_near and not is_whole)


def first_growth(result: RunResult) -> GpuGrowth | None:
    """Return the growth that fills its GPU first; None if no GPU of the run has one."""
    is_whole = result.ended == "finished"
    found = [
        each
        for device in result.devices
        if (each := growth(device, device.total, device.total - device.headroom, is_whole=is_whole))
    ]
    return min(found, key=lambda each: each.steps_left, default=None)


def growth_before_oom(result: RunResult, larger_run: RunResult) -> GpuGrowth | None:
    """Return the growth without which a run would have had enough memory, if any.

    larger_run: the same run on a GPU with more memory.
    """
    found = first_growth(larger_run)
    if found is None or not result.steps or not result.devices:
        return None
    own, larger = result.fullest_device, _device(larger_run, found.device)
    at_first = _coming_peak(larger.steps, found.bytes_per_step) - (
        found.bytes_per_step * larger.steps[-1].step
    )
    if at_first > own.total - own.outside:
        return None
    return replace(found, steps_left=0, decides=True)


def _device(result: RunResult, index: int) -> GpuMemory:
    return next(device for device in result.devices if device.device == index)


def deciding_growth(result: RunResult) -> GpuGrowth | None:
    """Return the growth for which a run that was stopped counts as one that does not fit."""
    found = first_growth(result)
    return found if found and found.decides else None


def _second_half(steps: Sequence[StepMemory]) -> Sequence[StepMemory]:
    """Return the steps that show the growth: gradients and optimizer state are created before."""
    return steps[len(steps) // 2 :]


def _kept(steps: Sequence[StepMemory]) -> Growth | None:
    points = [(step.step, step.allocated) for step in _second_half(steps)]
    return judge_growth("kept", points, MEASURED_EXACTLY)


def _needed(steps: Sequence[StepMemory]) -> Growth | None:
    points = [(step.step, step.peak_allocated) for step in _second_half(steps)]
    return judge_growth("larger_step", points, MEASURED_EXACTLY)


def _per_step(steps: Sequence[StepMemory], growth: Growth | None) -> int | None:
    if len(_second_half(steps)) < MIN_POINTS:
        return None
    return round(growth.bytes_per_step) if growth else 0


def _taken_per_step(steps: Sequence[StepMemory], per_step: int) -> float:
    """Return the bytes by which reserved memory grows, which is more if blocks leave rests."""
    points = thinned([(step.step, step.peak_reserved) for step in _second_half(steps)])
    return min(max(theil_sen(points) or 0.0, per_step), MAX_WASTE * per_step)


def _coming_peak(steps: Sequence[StepMemory], per_step: int) -> int:
    """Return the highest peak that the steps of the second half would have after the last step."""
    last = steps[-1].step
    return max(step.peak_allocated + per_step * (last - step.step) for step in _second_half(steps))
