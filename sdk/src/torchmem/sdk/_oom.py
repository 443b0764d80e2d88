"""One OutOfMemoryError, examined inside the allocator's observer.

The last five minutes of every device in memory, for the report of an OOM.

Writes the reports of this process's OOMs into the run directory: few, small, and always the newest.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torchmem.allocator.backend import Backend
from torchmem.allocator.fragmentation import measure
from torchmem.allocator.headroom import AvailableMemory
from torchmem.allocator.oom_cause import (
    OomFacts,
    classify,
    fragmentation_detail,
    largest_free_blocks,
)
from torchmem.allocator.oom_report import OomReport, Trend, encode
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.sample.run_directory import MAX_REPORT_BYTES, REPORT_SUFFIX, replace_file, report_name
from torchmem.sample.sample import Allocator, DeviceSample, Layout, OomDetail, OomRecord, Sample
from torchmem.sdk._device import DeviceRecord
from torchmem.sdk._publish import make_run_directory


@dataclass(frozen=True, slots=True)
class Scene:
    """What is only known in the observer; fields as in `torchmem.allocator.oom_report.OomReport`, `device` is torch's index."""

    device: int
    oom: OomRecord
    driver_free_bytes: int
    limit_bytes: int | None
    layout: Layout | None
    layout_before: Layout | None


@dataclass(frozen=True, slots=True)
class Observed:
    """The observer's arguments, in bytes: segment-rounded request, memory limit or device total, driver free."""

    requested: int
    limit: int
    driver_free: int


def examine(
    backend: Backend, record: DeviceRecord, config: AllocatorConfig, observed: Observed
) -> Scene:
    """Measure what the allocator kept after it had returned its cache, name the cause and count it in `record`.

    `record` holds statistics of this moment.
    """
    index, now, segments = record.device.index, time.time(), backend.memory_snapshot()
    layout = None
    if segments is not None:
        room = AvailableMemory(observed.driver_free, _reserved(record.allocator), observed.limit)
        layout = record.layout = measure(segments, index, now, room, config)
    facts = _facts(observed, record, layout, config)
    oom = OomRecord(
        now, observed.requested, classify(facts), _detail(backend, index, facts, segments)
    )
    record.record_oom(oom)
    limit = facts.limit if facts.total is not None and facts.limit < facts.total else None
    return Scene(index, oom, observed.driver_free, limit, layout, record.periodic_layout)


def _reserved(allocator: Allocator | None) -> int:
    return allocator.reserved_bytes.total if allocator else 0


def _facts(
    observed: Observed, record: DeviceRecord, layout: Layout | None, config: AllocatorConfig
) -> OomFacts:
    """Without a snapshot the pools cannot be told apart: every free byte counts as one of the default pools."""
    reserved = _reserved(record.allocator)
    unused = reserved - record.allocator.active_bytes.total if record.allocator else 0
    return OomFacts(
        requested=observed.requested,
        limit=observed.limit,
        driver_free=observed.driver_free,
        cached_free=layout.free_bytes if layout else unused,
        reserved=reserved,
        total=record.device.total_bytes,
        private_free=layout.private_free_bytes if layout else 0,
        large_segment=config.large_segment_size,
    )


def _detail(
    backend: Backend, device: int, facts: OomFacts, segments: Sequence[SegmentInfo] | None
) -> OomDetail | None:
    if segments is None or classify(facts) != "fragmentation":
        return None
    return fragmentation_detail(
        facts,
        largest_free_blocks(segments, device, facts.requested, backend.current_stream(device)),
    )


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
        points = [
            point for point in tuple(self._points.get(device, ())) if now - point[0] <= SPAN_SECONDS
        ]
        thin = -(-len(points) // MOST_POINTS) or 1
        kept = points[::-1][::thin][::-1]
        rows = [(round(now - point[0], 1), *point[1:]) for point in kept]
        return (
            Trend(**dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))) if rows else Trend()
        )


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


MOST_PER_PROCESS = 8
MOST_PER_USER = 64
# OOMs that follow each other within this time share a file, which holds the newest.
NEW_FILE_SECONDS = 60.0


class Evidence:
    """The reports of one process.

    The first OOM gets a file of its own. Of those that follow, as in a search for the batch size, each minute gets one
    file that is replaced, so that a hundred OOMs leave two files and the one that ended the process is among them.
    """

    def __init__(self, sample_path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = sample_path.parent
        self._sample_name = sample_path.name
        self._clock = clock
        self._history = History(clock)
        self._writing = (
            threading.RLock()
        )  # a signal handler of the script may run out of memory in the midst of it
        self._number = 0
        self._opened = 0.0

    def remember(self, sample: Sample) -> None:
        """Take a point of the last minutes."""
        self._history.add(sample)

    def write(self, scene: Scene, sample: Sample) -> None:
        """Write one report; raises OSError, or ValueError when it would be too large."""
        content = _encode(compose(scene, sample, self._history.trend(scene.device)))
        with self._writing:  # several devices may fail at once, each in a thread of its own
            self._store(content)

    def _store(self, content: bytes) -> None:
        make_run_directory(self._directory)
        fresh = self._number < 2 or self._clock() - self._opened >= NEW_FILE_SECONDS
        number = self._number + fresh
        replace_file(self._path(number), content)
        if fresh:
            self._number, self._opened = number, self._clock()
            self._path(number - MOST_PER_PROCESS).unlink(missing_ok=True)
            keep_newest(self._directory, MOST_PER_USER)

    def _path(self, number: int) -> Path:
        return self._directory / report_name(self._sample_name, number)


def compose(scene: Scene, sample: Sample, trend: Trend) -> OomReport:
    """The report: what the observer saw, beside what was published with it."""
    return OomReport(
        timestamp=sample.timestamp,
        process=sample.process,
        device=next(device for device in sample.devices if device.index == scene.device),
        oom=scene.oom,
        driver_free_bytes=scene.driver_free_bytes,
        limit_bytes=scene.limit_bytes,
        layout=scene.layout,
        layout_before=scene.layout_before,
        steps=sample.steps,
        allocator_settings=sample.allocator_settings,
        trend=trend,
    )


def _encode(report: OomReport) -> bytes:
    content = encode(report)
    if len(content) > MAX_REPORT_BYTES:
        content = encode(replace(report, trend=Trend()))
    if len(content) > MAX_REPORT_BYTES:
        raise ValueError(f"the report has {len(content)} bytes")
    return content


def keep_newest(directory: Path, most: int) -> None:
    """Remove this user's oldest reports beyond the number `most`; raises OSError."""
    mine = []
    for path in directory.glob(f"*{REPORT_SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid():
                mine.append((status.st_mtime, path))
    for _, path in sorted(mine)[: max(0, len(mine) - most)]:
        path.unlink(missing_ok=True)
