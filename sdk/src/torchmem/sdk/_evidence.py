"""Writes the reports of this process's OOMs into the run directory: few, small, and always the newest."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torchmem.core.report import OomReport, Trend, encode
from torchmem.core.rundir import MAX_REPORT_BYTES, REPORT_SUFFIX, report_name
from torchmem.core.sample import Sample
from torchmem.sdk._history import History
from torchmem.sdk._oom import Scene
from torchmem.sdk._publish import make_run_directory, replace_file

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
        self._writing = threading.RLock()  # a signal handler of the script may run out of memory in the midst of it
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
