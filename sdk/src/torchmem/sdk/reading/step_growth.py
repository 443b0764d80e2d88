"""Growth from step to step, judged by a few steps, so that a job of seconds is judged in time.

A suspicion is enough here, because it only starts a recording with a bounded cost. What users are
told about growth is judged by the whole run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

# The first steps' memory grows in every job: gradients and the optimizer's state appear.
WARM_UP_STEPS = 2
# Each of this many reads in a row is higher than all before, by similar amounts: five random
# values are in this order once in 120 times, and hardly ever after more reads, ...
STEADY_READS = 5
# ... where similar means at least this share of their median.
SIMILAR = 0.5
# Growth under batches of many lengths: so many of these reads are higher than all before.
NOISY_READS = 10
NOISY_RECORDS = 7
# A smaller rise within these reads, as a share of the device, is noise.
MIN_RISE = 0.001
# Memory is used up soon if that takes fewer steps, or less time.
SOON_STEPS = 300
SOON_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Read:
    """What was read at the end of a step; `is_record` if it was the highest value until then."""

    step: int
    seconds: float
    value: int
    is_record: bool


class Series:
    """The newest reads of one quantity."""

    def __init__(self) -> None:
        self._reads: deque[Read] = deque(maxlen=NOISY_READS + 1)
        self._highest: int | None = None

    def add(self, step: int, seconds: float, value: int) -> None:
        """Add a read."""
        highest = self._highest
        self._reads.append(Read(step, seconds, value, highest is not None and value > highest))
        self._highest = value if highest is None else max(highest, value)

    def rise(self) -> tuple[Read, Read] | None:
        """Return the first and the last read of a lasting rise; None if there is none."""
        reads = list(self._reads)
        if _is_steady(reads[-STEADY_READS - 1 :]):
            return reads[-STEADY_READS - 1], reads[-1]
        if len(reads) > NOISY_READS and sum(read.is_record for read in reads[1:]) >= NOISY_RECORDS:
            return reads[0], reads[-1]
        return None


def _is_steady(reads: list[Read]) -> bool:
    if len(reads) <= STEADY_READS or not all(read.is_record for read in reads[1:]):
        return False
    rises = [
        (later.value - read.value) / (later.step - read.step) for read, later in pairwise(reads)
    ]
    return min(rises) >= SIMILAR * median(rises)


class StepGrowth:
    """Tells whether the memory of one device grows from step to step and will be used up soon.

    Two quantities may grow: what is allocated between steps, and what the steps need at their peak.
    """

    def __init__(self) -> None:
        self._step = WARM_UP_STEPS - 1
        self._series = Series(), Series()

    def update(  # noqa: PLR0913, PLR0917 - one read
        self, step: int, seconds: float, allocated: int, peak: int, left: int, total: int
    ) -> bool:
        """Take a read at a step's end: bytes in use, at the peak, left at the peak, and in all."""
        if step <= self._step:
            return False
        self._step = step
        for series, value in zip(self._series, (allocated, peak), strict=True):
            series.add(step, seconds, value)
        rises = (series.rise() for series in self._series)
        return any(rise is not None and _is_soon(*rise, left, total) for rise in rises)


def _is_soon(first: Read, last: Read, left: int, total: int) -> bool:
    """Return whether a rise that continues will use up the device soon."""
    rise, steps = last.value - first.value, last.step - first.step
    return rise >= MIN_RISE * total and is_soon(
        left * steps / rise, (last.seconds - first.seconds) / steps
    )


def is_soon(steps_left: float, seconds_per_step: float) -> bool:
    """Return whether this many more steps count as soon."""
    return steps_left < SOON_STEPS or steps_left * seconds_per_step < SOON_SECONDS
