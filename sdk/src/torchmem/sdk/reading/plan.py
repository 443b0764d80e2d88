"""The peak to expect of the largest batch that the script plans, by the peaks of earlier ones.

The active peak of a training step is modeled as a line over the size of its batch. The points are
the steps whose peak is known: those that raised PyTorch's peak or had the largest batch so far.
"""

from __future__ import annotations

import logging
from collections import deque
from numbers import Real
from statistics import linear_regression

from torchmem.sdk.draft import Draft
from torchmem.sdk.part import Part
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.errors import Stage, log

MIN_POINTS, MAX_POINTS = 4, 16
MIN_DISTANCE = 1.03
"""Two points whose sizes differ by a smaller factor are one."""
MIN_RANGE = 1.25
"""The largest size of the points divided by the smallest."""
MAX_REACH = 10.0
"""The planned size, divided by the largest that was seen."""
MAX_DEVIATION = 0.1
"""How far a point may lie from the line, as a share of what the line rises between the points."""
WARM_UP_READS = 3
"""The first steps allocate the optimizer's state and the workspaces of libraries."""

MAX_SIZE = 1e18

Point = tuple[float, int]
"""Size of a batch, and the peak in bytes."""


class Plan:
    """What the script says about its batches: the largest one planned, and the ones that it runs.

    All sizes have the same unit, such as tokens. `largest` is None without a plan. `is_by_hand` is
    True if the script gives the size of each batch.
    """

    def __init__(self) -> None:
        self.largest: float | None = None
        self.is_by_hand = False
        self._size = 0.0
        self._has_warned = False

    def set(self, largest: float | None) -> None:
        """Take the size of the largest batch that is planned; None ends the plan."""
        if largest is None or self._is_size(largest):
            self.largest = None if largest is None else float(largest)

    def batch(self, size: float) -> None:
        """Note a batch. It is called in each step, and does little."""
        # The usual int is only compared, below; a bool has another type.
        if type(size) is not int and not self._is_size(size):
            return
        if self._size < size < MAX_SIZE:
            self._size = float(size)

    def batch_by_hand(self, size: float) -> None:
        """Note a batch; from the first call on, only these count."""
        if not self.is_by_hand:
            self.is_by_hand, self._size = True, 0.0
        self.batch(size)

    def _is_size(self, size: object) -> bool:
        """Return whether it is a number; comparing a tensor would wait for the device."""
        number = float(size) if isinstance(size, Real) and not isinstance(size, int) else size
        if isinstance(number, int | float) and 0 < number < MAX_SIZE:
            return True
        if not self._has_warned:
            self._has_warned = True
            log(
                logging.WARNING,
                "the size of a batch is ignored: it must be a number above 0, not %s",
                size if isinstance(number, int | float) else type(size).__name__,
            )
        return False

    def take(self) -> float:
        """Return the size of the largest batch since the last call, 0 if there was none."""
        size, self._size = self._size, 0.0
        return size


class PlannedPeaks(Part):
    """Follows the peaks of each device, as long as there is a plan."""

    stage: Stage = "step"

    def __init__(self, plan: Plan, recorder: Recorder) -> None:
        self._plan = plan
        self._recorder = recorder
        self._peaks: dict[int, PeakBySize] = {}

    def after_read(self, step: int | None) -> None:
        """Take the peaks of a step that were just read."""
        if step is None or self._plan.largest is None:
            return
        size = self._plan.take()
        for index, record in self._recorder.records().items():
            if record.allocator:
                peaks = self._peaks.setdefault(index, PeakBySize())
                peaks.add(size, record.allocator.active_peak_bytes or 0)

    def complete(self, sample: Draft) -> None:
        """Add the peak to expect of the largest batch."""
        largest = self._plan.largest
        for device in sample.devices:
            peaks = self._peaks.get(device.index)
            if peaks is not None and largest is not None:
                device.add(planned_peak_bytes=peaks.expected(largest))


class PeakBySize:
    """The peaks of one device by the size of the batch."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._warm_up = WARM_UP_READS
        self._peak = 0
        self._largest = 0.0
        self._line: tuple[float, float] | None = None

    def add(self, size: float, peak: int) -> None:
        """Take the peak since the process started, and the largest batch since the last call.

        Without a batch, as in an evaluation, the rise says nothing about the plan.
        """
        is_news = size > 0 and (peak > self._peak or size > self._largest)
        self._peak = max(self._peak, peak)
        if self._warm_up:
            self._warm_up -= int(size > 0)
        elif is_news:
            self._largest = max(self._largest, size)
            self._keep(size)
            self._line = fitted(list(self._points))

    def _keep(self, size: float) -> None:
        last = self._points[-1][0] if self._points else 0.0
        if last and max(size, last) < MIN_DISTANCE * min(size, last):
            size = max(size, self._points.pop()[0])
        self._points.append((size, self._peak))

    def expected(self, largest: float) -> int | None:
        """Return the peak to expect, in bytes, with a batch of this size; None if it is unknown.

        It is never below the peak so far.
        """
        if 0 < largest <= self._largest:
            return self._peak
        if self._line is None or largest > MAX_REACH * self._largest:
            return None
        base, slope = self._line
        return max(self._peak, round(base + slope * largest))


def fitted(points: list[Point]) -> tuple[float, float] | None:
    """Return base and slope of a line on or above as many of the newest points as lie close to it.

    Older points may be outdated: the model has grown, or the optimizer had no state yet.
    None if the newest MIN_POINTS are not close to a line, or do not rise.
    """
    for first in range(len(points) - MIN_POINTS + 1):
        line = _line(points[first:])
        if line is not None:
            return line
    return None


def _line(points: list[Point]) -> tuple[float, float] | None:
    """Return the least-squares line, raised to the highest point, or None if it does not fit."""
    sizes, peaks = zip(*points, strict=True)
    low, high = min(sizes), max(sizes)
    if high < MIN_RANGE * low:
        return None
    slope, base = linear_regression(sizes, peaks)
    deviations = [peak - base - slope * size for size, peak in points]
    if slope <= 0 or max(map(abs, deviations)) > MAX_DEVIATION * slope * (high - low):
        return None
    return base + max(deviations), slope
