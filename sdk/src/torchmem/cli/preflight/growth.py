"""Whether the memory that is left at the end of a step grows from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import StatisticsError, correlation, linear_regression

from torchmem.preflight.outcome import StepMemory

LEAST_STEPS = 4
STEADY = 0.9
"""Correlation of memory and step from which on it grows: a single jump has 0.87 at most, sizes that vary have less."""


def growth(steps: Sequence[StepMemory]) -> int | None:
    """Bytes per step over the second half of the run; 0 when it does not grow, None when there are too few steps.

    The first half is left out because that is when gradients and the optimizer's state are made.
    """
    second = [step.allocated for step in steps[len(steps) // 2 :]]
    if len(second) < LEAST_STEPS:
        return None
    numbers = list(range(len(second)))
    try:
        if correlation(numbers, second) < STEADY:
            return 0
    except StatisticsError:  # all the same
        return 0
    if sum(later < earlier for earlier, later in pairwise(second)) > len(second) // 4:
        return 0
    return max(0, round(linear_regression(numbers, second).slope))
