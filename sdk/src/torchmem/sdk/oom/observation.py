"""What the SDK does at an OutOfMemoryError: find its cause, and leave a report on disk.

`examine` runs inside the allocator's OOM observer. The report shows the last five minutes too,
which are kept in memory for it. `torchmem oom` explains reports.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torchmem.allocator.backend import Backend
from torchmem.allocator.fragmentation import measurement
from torchmem.allocator.headroom import AvailableMemory
from torchmem.allocator.oom_cause import OomFacts, largest_free_blocks
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.explain.call_stack import Origin, public_place
from torchmem.explain.lines import Lines, lines, without_parts
from torchmem.explain.oom_report import OomReport, OomTrend, encode
from torchmem.explain.verdict import Circumstances, Verdict, judge, judge_library
from torchmem.sample.run_directory import (
    MAX_REPORT_BYTES,
    PROCESS_FORM,
    REPORT_SUFFIX,
    report_name,
    reserve_path,
)
from torchmem.sample.sample import DeviceSample, Layout, OomRecord, Sample
from torchmem.sdk.oom.ending import LibraryOom
from torchmem.sdk.publish.publisher import restore_directory
from torchmem.sdk.publish.reserve import FULL, Reserve
from torchmem.sdk.reading.device import DeviceRecord
from torchmem.sdk.safety.interruptions import ignore

TREND_SECONDS = 300
MIN_POINT_SECONDS = 1.0
MAX_TREND_POINTS = 60

MAX_REPORTS_PER_PROCESS = 8
MAX_REPORTS_PER_USER = 64
# OOMs that follow each other within this time share a file, which holds the newest.
NEW_FILE_SECONDS = 60.0

_REPORT_NAME = re.compile(rf"{PROCESS_FORM}-\d+{re.escape(REPORT_SUFFIX)}")


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """The observer's arguments in bytes.

    requested: the request, rounded to a segment.
    limit: the memory limit, or the device's total.
    driver_free: free memory at the driver.
    origin: where in the program it was asked for.
    """

    requested: int
    limit: int
    driver_free: int
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class OomObservation:
    """What is only known inside the observer.

    `device` is torch's index and `segments` the snapshot of `layout`; the other fields are those of
    `torchmem.explain.oom_report.OomReport`.
    """

    device: int
    oom: OomRecord
    driver_free_bytes: int
    limit_bytes: int | None
    layout: Layout | None
    layout_before: Layout | None
    origin: Origin | None = None
    lines: Lines | None = None
    verdict: Verdict | None = None
    segments: Sequence[SegmentInfo] | None = None
    tensors: tuple[TensorGroup, ...] = ()


def examine(
    backend: Backend,
    record: DeviceRecord,
    config: AllocatorConfig,
    failed: FailedAllocation,
    about: Circumstances,
) -> OomObservation:
    """Measure what the allocator kept after it returned its cache, and count the OOM in `record`.

    The statistics in `record` must have been read inside the same observer call.
    """
    index, now, segments = record.device.index, time.time(), backend.memory_snapshot()
    layout = None
    if segments is not None:
        reserved = record.reserved_bytes()
        available = AvailableMemory(failed.driver_free, reserved, failed.limit)
        record.measured = measurement(segments, index, now, available, config)
        layout = record.layout
    facts = _facts(failed, record, layout, config)
    blocks = None
    if segments is not None:
        stream = backend.current_stream(index)
        blocks = largest_free_blocks(segments, index, facts.requested, stream)
    verdict = judge(facts, blocks, about)
    oom = _record(now, failed.requested, verdict, failed.origin)
    record.record_oom(oom)
    limit = facts.limit if facts.total is not None and facts.limit < facts.total else None
    before, held = record.periodic_layout, lines(segments or (), index)
    free, origin = failed.driver_free, failed.origin
    return OomObservation(index, oom, free, limit, layout, before, origin, held, verdict, segments)


def _record(
    now: float, requested: int | None, verdict: Verdict, origin: Origin | None
) -> OomRecord:
    onset = verdict.why.onset if verdict.why else None
    line, function = _place(origin)
    return OomRecord(now, requested, verdict.cause, verdict.detail, line, function, onset)


def _place(origin: Origin | None) -> tuple[str, str] | tuple[None, None]:
    own = origin.own if origin else None
    return public_place(own) if own else (None, None)


def examine_library_oom(
    backend: Backend,
    record: DeviceRecord,
    config: AllocatorConfig,
    failed: LibraryOom,
    about: Circumstances,
) -> OomObservation:
    """Measure what a library's failed allocation left, and count it in `record`.

    The statistics in `record` must be new. PyTorch's cache is still as it was at the failure.
    """
    index, now, segments = record.device.index, time.time(), backend.memory_snapshot()
    free = backend.free_bytes(index) or 0
    if segments is not None:
        record.measured = measurement(segments, index, now, AvailableMemory(free), config)
    request = FailedAllocation(failed.requested or 0, record.device.total_bytes or 0, free)
    facts = _facts(request, record, record.layout, config)
    verdict = judge_library(facts, _cached(record), about)
    oom = _record(now, failed.requested, verdict, failed.origin)
    record.record_oom(oom)
    limit, total = backend.limit_bytes(index), record.device.total_bytes
    limit = limit if limit is not None and total is not None and limit < total else None
    layout = record.layout if segments is not None else None
    before, held = record.periodic_layout, lines(segments or (), index)
    return OomObservation(
        index, oom, free, limit, layout, before, failed.origin, held, verdict, segments
    )


def _cached(record: DeviceRecord) -> int | None:
    """Return the bytes that PyTorch could have released for a library; None if unknown.

    Without a layout they are at most the reserved bytes that hold no tensor, and unknown.
    """
    return record.layout.releasable_bytes if record.layout else None


def _facts(
    failed: FailedAllocation, record: DeviceRecord, layout: Layout | None, config: AllocatorConfig
) -> OomFacts:
    """Return the facts of the OOM; without a snapshot all free bytes count as default pools'."""
    reserved = record.reserved_bytes()
    unused = reserved - record.allocator.active_bytes.total if record.allocator else 0
    return OomFacts(
        requested=failed.requested,
        limit=failed.limit,
        driver_free=failed.driver_free,
        cached_free=layout.free_bytes if layout else unused,
        reserved=reserved,
        total=record.device.total_bytes,
        private_free=layout.private_free_bytes if layout else 0,
        large_segment=config.large_segment_size,
    )


_COLUMNS = [column.name for column in fields(OomTrend)]


class History:
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


class ReportWriter:
    """Writes the OOM reports of one process beside its sample file.

    The first OOM gets a file of its own. Of those that follow, as in a batch-size search,
    each minute gets one file that is replaced. A hundred OOMs in a minute therefore leave two
    files, and the OOM that ends the process is always in the newest one.
    """

    def __init__(self, sample_path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = sample_path.parent
        self._sample_name = sample_path.name
        self._reserve = Reserve(reserve_path(self._path(0)))
        self._clock = clock
        self._history = History(clock)
        # Reentrant: a signal handler of the script may run out of memory during a write.
        self._lock = threading.RLock()
        self._number = 0
        self._opened = 0.0
        self._pending: dict[int, OomReport] = {}

    def remember(self, sample: Sample) -> None:
        """Add a published sample to the history, and keep room for a report."""
        self._history.add(sample)
        self._reserve.keep(MAX_REPORT_BYTES)

    def write(self, observation: OomObservation, sample: Sample) -> None:
        """Write one report. Raises OSError, or ValueError if the report is too large."""
        trend = self._history.trend(observation.device)
        report = compose(observation, sample, trend)
        content = _encode(report)
        with self._lock:  # several devices may fail at once, each in its own thread
            self._store(content)
            self._pending[self._number] = report
            self._pending.pop(self._number - MAX_REPORTS_PER_PROCESS, None)

    def add_tensors(self, read: Callable[[int], tuple[TensorGroup, ...]]) -> None:
        """Add tensors to the newest report if it has none; `read` gets the device's index.

        Raises OSError.
        """
        with self._lock:
            number = max(self._pending, default=0)
            report = self._pending.get(number)
            if report is not None and not report.tensors:
                report = replace(report, tensors=read(report.device.index))
                self._pending[number] = report
                self._reserve.replace(self._path(number), _encode(report))

    def mark_survived(self, is_pending: Callable[[], bool]) -> None:
        """Mark in the reports that the process continued, if that is certain. Raises OSError."""
        with self._lock:
            while self._pending and not is_pending():
                number, report = self._pending.popitem()
                path = self._path(number)
                with ignore(FileNotFoundError):
                    modified = path.stat().st_mtime_ns
                    self._reserve.replace(path, _encode(replace(report, survived=True)))
                    os.utime(path, ns=(modified, modified))

    def _store(self, content: bytes) -> None:
        restore_directory(self._directory)
        is_new = self._number < 2 or self._clock() - self._opened >= NEW_FILE_SECONDS
        number = self._number + is_new
        self._replace(number, content)
        if is_new:
            self._number, self._opened = number, self._clock()
            self._path(number - MAX_REPORTS_PER_PROCESS).unlink(missing_ok=True)
            keep_newest(self._directory, MAX_REPORTS_PER_USER)

    def _replace(self, number: int, content: bytes) -> None:
        """Write a report; in the room of the previous one if there is no other."""
        try:
            self._reserve.replace(self._path(number), content)
        except OSError as error:
            if error.errno not in FULL or number == self._number:
                raise
            self._reserve.take(self._path(self._number))
            self._reserve.replace(self._path(number), content)

    def close(self) -> None:
        """Give back the room for a report. Raises OSError."""
        self._reserve.release()

    def _path(self, number: int) -> Path:
        return self._directory / report_name(self._sample_name, number)


def compose(observation: OomObservation, sample: Sample, trend: OomTrend) -> OomReport:
    """Return the report of an OOM: the observation, and the sample published with it."""
    return OomReport(
        timestamp=sample.timestamp,
        process=sample.process,
        device=next(device for device in sample.devices if device.index == observation.device),
        oom=observation.oom,
        driver_free_bytes=observation.driver_free_bytes,
        limit_bytes=observation.limit_bytes,
        layout=observation.layout,
        layout_before=observation.layout_before,
        steps=sample.steps,
        allocator_settings=sample.allocator_settings,
        trend=trend,
        origin=observation.origin,
        lines=observation.lines,
        tensors=observation.tensors,
        verdict=observation.verdict,
    )


def _encode(report: OomReport) -> bytes:
    """Encode the report; if it is too large, without its least important parts, in this order."""
    smaller = replace(report, trend=OomTrend(), lines=report.lines and without_parts(report.lines))
    for candidate in (report, smaller, replace(smaller, origin=None, lines=None)):
        content = encode(candidate)
        if len(content) <= MAX_REPORT_BYTES:
            return content
    raise ValueError(f"the report has {len(content)} bytes")


def keep_newest(directory: Path, limit: int, names: re.Pattern[str] = _REPORT_NAME) -> None:
    """Remove the oldest files with such names in a directory until `limit` remain.

    Raises OSError.
    """
    files = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if names.fullmatch(entry.name):
                with ignore(OSError):
                    files.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
    for _, name in sorted(files)[: max(0, len(files) - limit)]:
        (directory / name).unlink(missing_ok=True)
