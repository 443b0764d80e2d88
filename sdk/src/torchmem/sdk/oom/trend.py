"""The last minutes of every device, kept in memory for the report of an OOM."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torchmem.explain.oom_report import OomTrend
from torchmem.sample.sample import DeviceSample, Sample

TREND_SECONDS = 300
MIN_POINT_SECONDS = 1.0
MAX_TREND_POINTS = 60

_COLUMNS = [column.name for column in fields(OomTrend)]


class RecentSamples:
    """The last minutes of every device, at most one point a second: about 100 KB a device."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: float | None = None
        self._points: dict[int, deque[tuple[Any, ...]]] = {}

    def add(self, sample: Sample) -> None:
        """Keep a published sample, unless one was kept within the last second."""
        now = self._clock()
        if self._newest is not None and now - self._newest < MIN_POINT_SECONDS:
            return
        self._newest = now
        for device in sample.devices:
            points = self._points.setdefault(device.index, deque(maxlen=TREND_SECONDS))
            points.append((now, *_values(device), sample.steps.count))

    def trend(self, device: int) -> OomTrend:
        """Return the last five minutes of one device, thinned evenly to MAX_TREND_POINTS.

        The newest point is always among them.
        """
        now = self._clock()
        points = [
            point
            for point in tuple(self._points.get(device, ()))
            if now - point[0] <= TREND_SECONDS
        ]
        stride = -(-len(points) // MAX_TREND_POINTS) or 1
        kept = points[::-1][::stride][::-1]
        if not kept:
            return OomTrend()
        rows = [(round(now - point[0], 1), *point[1:]) for point in kept]
        return OomTrend(**dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True)))


def _values(device: DeviceSample) -> tuple[float | None, ...]:
    """Return the columns of `OomTrend` between the first and the last."""
    allocator, layout = device.allocator, device.layout
    ratio = layout.fragmentation_ratio if layout else None
    return (
        allocator.allocated_bytes.total if allocator else None,
        allocator.reserved_bytes.total if allocator else None,
        allocator.active_bytes.total if allocator else None,
        layout.stranded_bytes if layout else None,
        None if ratio is None else round(ratio, 4),
        layout.headroom_flush_bytes if layout else None,
        device.counters.alloc_retries,
    )
