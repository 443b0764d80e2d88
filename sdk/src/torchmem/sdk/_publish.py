"""Where a process publishes its sample: the run directory and, on request, textfile and port."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.sample.capture_messages import CAPTURE_SUFFIXES
from torchmem.sample.run_directory import (
    RUN_DIR_MODE,
    SAMPLE_SUFFIX,
    TEMPORARY_SUFFIX,
    replace_file,
    sample_name,
)
from torchmem.sample.sample import Process, Sample, encode
from torchmem.sdk._cost import HEARTBEAT_SECONDS
from torchmem.sdk._errors import Errors
from torchmem.sdk._settings import Settings

if TYPE_CHECKING:
    from torchmem.sdk._outputs import Endpoint, Textfile

# Files of dead processes are removed after this time, for nodes that run no exporter.
STALE_FILE_SECONDS = 24 * 3600
LOCK_SECONDS = 1.0


class SampleFile:
    """This process's sample file in the run directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self.newest: Sample | None = None

    def write(self, sample: Sample) -> None:
        """Replace the file; create the directory again if it has vanished. Raises OSError."""
        if self.newest is None:
            make_run_directory(self.path.parent)
            remove_stale_files(self.path.parent, time.time() - STALE_FILE_SECONDS)
        content = encode(sample)
        try:
            replace_file(self.path, content)
        except FileNotFoundError:
            make_run_directory(self.path.parent)
            replace_file(self.path, content)
        self.newest = sample

    def refresh(self, sample: Sample) -> None:
        """Replace the file if the sample has changed or a heartbeat is due. Raises OSError."""
        if self.newest is None or _is_news(sample, self.newest):
            self.write(sample)


def _is_news(sample: Sample, old: Sample) -> bool:
    """Return whether more than the clock and the SDK's own cost changed, or `old` is too old."""
    if (
        sample.steps.count != old.steps.count
        or abs(sample.timestamp - old.timestamp) >= HEARTBEAT_SECONDS
    ):
        return True
    cost = replace(old.cost, errors=sample.cost.errors)
    return old != replace(sample, timestamp=old.timestamp, steps=old.steps, cost=cost)


def make_run_directory(directory: Path) -> None:
    """Create the run directory, writable by all users with the sticky bit.

    Raises OSError, also for a symbolic link that another user put in its place.
    """
    try:
        directory.mkdir(parents=True)
        directory.chmod(RUN_DIR_MODE)
    except FileExistsError:
        if not directory.is_dir():
            raise
        status = directory.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in {0, os.getuid()}:
            raise PermissionError(f"{directory} is a symbolic link of another user") from None


def remove_stale_files(directory: Path, before: float) -> None:
    """Remove this user's samples and captures, also unfinished ones, older than `before`.

    `before` is a Unix time and is compared with the time of the last write.
    """
    suffixes = (SAMPLE_SUFFIX, *CAPTURE_SUFFIXES, TEMPORARY_SUFFIX)
    for path in (path for suffix in suffixes for path in directory.glob(f"*{suffix}")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_mtime < before:
                path.unlink()


class Publisher:
    """All outputs of one process.

    `publish` is called from the sampler, the OOM observer, a signal handler, and at exit, and never
    raises. `sample` returns the current state; nothing is written before the first `publish`.
    """

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        process: Process,
        errors: Errors,
        sample: Callable[[], Sample],
    ) -> None:
        self._settings = settings
        self._errors = errors
        self._sample = sample
        self._local_rank = process.local_rank or 0
        self._lock = threading.Lock()
        self._textfile: Textfile | None = None
        self._endpoint: Endpoint | None = None
        name = sample_name(process.pid, process.pid_namespace, process.start_ticks)
        self.file = SampleFile(settings.directory(environment), name)
        if settings.textfile is not None:
            from torchmem.sdk._outputs import Textfile

            self._textfile = Textfile(settings.textfile, process.rank)

    def open_endpoint(self) -> None:
        """Start to listen if the settings ask for a port."""
        with self._errors.suppress("endpoint"):
            if self._settings.port is not None:
                from torchmem.sdk._outputs import Endpoint

                self._endpoint = Endpoint.open(self._settings, self._local_rank, self._sample)

    @property
    def url(self) -> str | None:
        """URL of the endpoint, or None without one."""
        return self._endpoint.url if self._endpoint else None

    def publish(self, *, news_only: bool = False) -> None:
        """Write the current state to all files; with `news_only` only where it is due."""
        with self._errors.suppress("publish"):
            is_locked = self._lock.acquire(timeout=LOCK_SECONDS)
            try:
                (self.file.refresh if news_only else self.file.write)(self._sample())
            finally:
                if is_locked:
                    self._lock.release()
        with self._errors.suppress("textfile"):
            if self._textfile:
                (self._textfile.refresh if news_only else self._textfile.write)(self._sample())

    def close(self) -> None:
        """Remove the textfile and close the port; the sample file stays. Raises OSError."""
        if self._textfile:
            self._textfile.remove()
        if self._endpoint:
            self._endpoint.close()

    def close_in_child(self) -> None:
        """Close the parent's port in a forked child."""
        if self._endpoint:
            self._endpoint.close_in_child()
