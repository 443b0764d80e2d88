"""The last five minutes of every device in memory, for the report of an OOM."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torchmem.core.report import Trend
from torchmem.core.sample import DeviceSample, Sample

SPAN_SECONDS = 300
SHORTEST_INTERVAL_SECONDS = 1.0
MOST_POINTS = 60  # of a trend

_COLUMNS = [column.name for column in fields(Trend)]


class History:
    """At most one point a second for each device; about 100 KB a device when full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: float | None = None
        self._points: dict[int, deque[tuple[Any, ...]]] = {}

    def add(self, sample: Sample) -> None:
        """Remember a published sample, unless one was remembered within the last second."""
        now = self._clock()
        if self._newest is not None and now - self._newest < SHORTEST_INTERVAL_SECONDS:
            return
        self._newest = now
        for device in sample.devices:
            points = self._points.setdefault(device.index, deque(maxlen=SPAN_SECONDS))
            points.append((now, *_values(device), sample.steps.count))

    def trend(self, device: int) -> Trend:
        """The last five minutes of one device, thinned evenly to MOST_POINTS; the newest point is always kept."""
        now = self._clock()
        points = [point for point in tuple(self._points.get(device, ())) if now - point[0] <= SPAN_SECONDS]
        thin = -(-len(points) // MOST_POINTS) or 1
        kept = points[::-1][::thin][::-1]
        rows = [(round(now - point[0], 1), *point[1:]) for point in kept]
        return Trend(**dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))) if rows else Trend()


def _values(device: DeviceSample) -> tuple[float | None, ...]:
    """The columns of `Trend` between the first and the last."""
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
