"""Leaves a report on disk at an OOM; `torchmem why` explains it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torchmem.explain.lines import without_parts
from torchmem.explain.oom_report import OomReport, OomTrend, encode
from torchmem.sample.native_threads import Lock
from torchmem.sample.run_directory import (
    MAX_REPORT_BYTES,
    PROCESS_FORM,
    REPORT_SUFFIX,
    report_name,
    reserve_path,
)
from torchmem.sample.sample import Sample
from torchmem.sdk.observation import OomObservation
from torchmem.sdk.oom.trend import RecentSamples
from torchmem.sdk.publish.reserve import FULL, Reserve
from torchmem.sdk.publish.sample_file import restore_directory
from torchmem.sdk.safety.interruptions import call_holding, ignore

LOCK_SECONDS = 1.0
MAX_REPORTS_PER_PROCESS = 8
MAX_REPORTS_PER_USER = 64
# OOMs that follow each other within this time share a file, which holds the newest.
NEW_FILE_SECONDS = 60.0

_REPORT_NAME = re.compile(rf"{PROCESS_FORM}-\d+{re.escape(REPORT_SUFFIX)}")


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
        self._recent = RecentSamples(clock)
        # Reentrant: a signal handler of the script may run out of memory during a write.
        self._lock = Lock(reentrant=True)
        self._number = 0
        self._opened = 0.0
        self._pending: dict[int, OomReport] = {}

    def remember(self, sample: Sample) -> None:
        """Add a published sample to the history, and keep room for a report."""
        self._recent.add(sample)
        self._reserve.keep(MAX_REPORT_BYTES)

    def write(self, observation: OomObservation, sample: Sample) -> OomReport:
        """Write one report and return it. Raises OSError, or ValueError if it is too large."""
        trend = self._recent.trend(observation.device)
        report = compose(observation, sample, trend)
        content = _encode(report)
        # Several devices may fail at once, each in its own thread.
        self._locked(lambda: self._write(report, content))
        return report

    def _write(self, report: OomReport, content: bytes) -> None:
        self._store(content)
        self._pending[self._number] = report
        self._pending.pop(self._number - MAX_REPORTS_PER_PROCESS, None)

    def _locked(self, call: Callable[[], None]) -> None:
        call_holding(self._lock, LOCK_SECONDS, call)

    def complete(self, completed: Callable[[OomReport], OomReport]) -> None:
        """Replace the newest report, if it is pending, by what `completed` returns for it.

        Raises OSError.
        """
        self._locked(lambda: self._complete(completed))

    def _complete(self, completed: Callable[[OomReport], OomReport]) -> None:
        number = max(self._pending, default=0)
        report = self._pending.get(number)
        if report is not None:
            self._pending[number] = completed(report)
            if self._pending[number] is not report:
                self._reserve.replace(self._path(number), _encode(self._pending[number]))

    def newest(self) -> tuple[OomReport, Path] | None:
        """Return the newest report that the process is not known to have survived, and its file."""
        number = max(tuple(self._pending), default=None)
        return None if number is None else (self._pending[number], self._path(number))

    def mark_survived(self, is_pending: Callable[[], bool]) -> None:
        """Mark in the reports that the process continued, if that is certain. Raises OSError."""
        self._locked(lambda: self._mark_survived(is_pending))

    def _mark_survived(self, is_pending: Callable[[], bool]) -> None:
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
        last_error_bytes=observation.last_error_bytes,
        verdict=observation.verdict,
        gradients_enabled=observation.gradients_enabled,
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
