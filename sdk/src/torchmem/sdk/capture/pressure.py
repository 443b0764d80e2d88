"""Whether the memory of a device may run out soon, by its newest reads.

A suspicion is enough here, because it only starts a recording with a bounded cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torchmem.explain.growth import (
    MIN_RISE_RATIO,
    SOON_SECONDS,
    SUSPICION,
    WARM_UP_STEPS,
    Point,
    is_soon,
    judge_growth,
)
from torchmem.sample.run_history import Growth, GrowthKind
from torchmem.sdk.reading.device import DeviceRecord

LOW_MARGIN = 0.1
"""Memory may run out soon if less than this share of the device is left at the peak."""
NEWEST_READS = SUSPICION.of + 1
POINT_SECONDS = 10.0
"""The least time between the reads that show growth in time."""


def margin(record: DeviceRecord, peak: int | None = None) -> int | None:
    """Return the bytes that the device has left at the peak; None if they are unknown.

    `peak` is by default that of the latest full read. Stranded bytes do not count, because a
    request may find them too small.
    """
    allocator, free = record.allocator, record.driver_free
    if allocator is None or free is None:
        return None
    stranded = record.layout.stranded_bytes if record.layout else 0
    peak = allocator.active_peak_bytes or 0 if peak is None else peak
    return max(0, allocator.reserved_bytes.total + free - peak - stranded)


class Pressure:
    """The signs are a retry, a low margin, and memory that is used up at a fast pace."""

    def __init__(self) -> None:
        self._used: deque[Point] = deque(maxlen=NEWEST_READS)
        self._retries: int | None = None

    def update(self, now: float, record: DeviceRecord) -> bool:
        """Take one read at `now` (monotonic seconds)."""
        retries, left, total = record.alloc_retries, margin(record), record.device.total_bytes
        retried = self._retries is not None and (retries or 0) > self._retries
        self._retries = retries
        if left is None or not total:
            return retried
        if not self._used or now - self._used[-1][0] >= POINT_SECONDS:
            self._used.append((now, total - left))
        pace = _pace("outside", tuple(self._used), total)
        is_fast = pace is not None and left / pace < SOON_SECONDS
        return retried or left < LOW_MARGIN * total or is_fast


class StepPressure:
    """The sign is growth from step to step of what is allocated at its end, or of the peak.

    By the highest values so far, so that batches of random sizes are no growth.
    """

    def __init__(self) -> None:
        self._reads: deque[tuple[int, float, int, int]] = deque(maxlen=NEWEST_READS)

    def update(  # noqa: PLR0913, PLR0917 - one read
        self, step: int, seconds: float, allocated: int, peak: int, left: int, total: int
    ) -> bool:
        """Take a read at a step's end: bytes in use, at the peak, left at the peak, and in all."""
        newest, _, highest, _ = self._reads[-1] if self._reads else (WARM_UP_STEPS - 1, 0.0, 0, 0)
        if step <= newest:
            return False
        self._reads.append((step, seconds, max(highest, allocated), peak))
        steps, times, kept, peaks = zip(*self._reads, strict=True)
        paces = (
            _pace("kept", tuple(zip(steps, kept, strict=True)), total),
            _pace("larger_step", tuple(zip(steps, peaks, strict=True)), total),
        )
        per_step = (times[-1] - times[0]) / max(1, steps[-1] - steps[0])
        return any(pace is not None and is_soon(left / pace, per_step) for pace in paces)


def _pace(kind: GrowthKind, points: Sequence[Point], total: int) -> float | None:
    """Return the bytes by which memory grows in each step or second; None if it does not."""
    if points[-1][1] - points[0][1] < MIN_RISE_RATIO * total:
        return None  # most reads end here, which costs next to nothing
    growth = judge_growth(kind, points, SUSPICION)
    return growth.bytes_per_step if growth else None


def is_used_up_soon(record: DeviceRecord, growth: Growth | None) -> bool:
    """Return whether what grows by the history of the run will use up the device soon."""
    history, left = record.run_history.published(), margin(record)
    if growth is None or history is None or left is None:
        return False
    seconds = (history.seconds[-1] - history.seconds[0]) / max(1, history.steps[-1])
    return is_soon(left / growth.bytes_per_step, seconds)
