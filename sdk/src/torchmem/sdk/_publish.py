"""Where a process publishes its state: its file in the run directory and, if asked for, a textfile and a port."""

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
from torchmem.sdk._errors import Errors
from torchmem.sdk._settings import Settings

if TYPE_CHECKING:
    from torchmem.sdk._outputs import Endpoint, Textfile

# Without an exporter nobody removes the last words of processes long gone.
FORGOTTEN_AFTER_SECONDS = 24 * 3600
# An exporter that cannot see the process judges it by the age of its sample, after a minute.
HEARTBEAT_SECONDS = 15.0


class RunFile:
    """This process's one file in the run directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self.newest: Sample | None = None

    def write(self, sample: Sample) -> None:
        """Publish; a directory that vanished is made again. Raises OSError."""
        if self.newest is None:
            make_run_directory(self.path.parent)
            sweep(self.path.parent, time.time() - FORGOTTEN_AFTER_SECONDS)
        content = encode(sample)
        try:
            replace_file(self.path, content)
        except FileNotFoundError:
            make_run_directory(self.path.parent)
            replace_file(self.path, content)
        self.newest = sample

    def refresh(self, sample: Sample) -> None:
        """Publish what is new, and a heartbeat when nothing is. Raises OSError."""
        if self.newest is None or _is_news(sample, self.newest):
            self.write(sample)

    def remove(self) -> None:
        """Take the file back, as a forked child or a closed session does. Raises OSError."""
        self.path.unlink(missing_ok=True)


def _is_news(sample: Sample, old: Sample) -> bool:
    """Whether more changed than the clock and what the SDK itself spends, or the old sample is past its time."""
    if (
        sample.steps.count != old.steps.count
        or abs(sample.timestamp - old.timestamp) >= HEARTBEAT_SECONDS
    ):
        return True
    cost = replace(old.cost, errors=sample.cost.errors)
    return old != replace(sample, timestamp=old.timestamp, steps=old.steps, cost=cost)


def make_run_directory(directory: Path) -> None:
    """Create the run directory, writable by all users with the sticky bit; raises OSError.

    A symbolic link that another user put in its place is refused.
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


def sweep(directory: Path, before: float) -> None:
    """Remove samples and captures of this user, unfinished ones too, last written before the Unix time `before`."""
    suffixes = (SAMPLE_SUFFIX, *CAPTURE_SUFFIXES, TEMPORARY_SUFFIX)
    for path in (path for suffix in suffixes for path in directory.glob(f"*{suffix}")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_mtime < before:
                path.unlink()


LOCK_SECONDS = 1.0


class Publisher:
    """Called from the sampler, the OOM observer, a signal handler and at exit; never raises but when it is made."""

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str],
        process: Process,
        errors: Errors,
        sample: Callable[[], Sample],
    ) -> None:
        """`sample` gives the state of the moment; nothing is written before the first `publish`."""
        self._settings = settings
        self._errors = errors
        self._sample = sample
        self._local_rank = process.local_rank or 0
        self._lock = threading.Lock()
        self._textfile: Textfile | None = None
        self._endpoint: Endpoint | None = None
        name = sample_name(process.pid, process.pid_namespace, process.start_ticks)
        self.file = RunFile(settings.directory(environment), name)
        if settings.textfile is not None:
            from torchmem.sdk._outputs import Textfile

            self._textfile = Textfile(settings.textfile, process.rank)

    def open_endpoint(self) -> None:
        """Listen where a port was asked for."""
        with self._errors.swallow("endpoint"):
            if self._settings.port is not None:
                from torchmem.sdk._outputs import Endpoint

                self._endpoint = Endpoint.open(self._settings, self._local_rank, self._sample)

    @property
    def url(self) -> str | None:
        """Address of the endpoint, if there is one."""
        return self._endpoint.url if self._endpoint else None

    def publish(self, *, news_only: bool = False) -> None:
        """Write the state of this moment everywhere; with `news_only` only where it is new or has grown old."""
        with self._errors.swallow("publish"):
            mine = self._lock.acquire(timeout=LOCK_SECONDS)
            try:
                (self.file.refresh if news_only else self.file.write)(self._sample())
            finally:
                if mine:
                    self._lock.release()
        with self._errors.swallow("textfile"):
            if self._textfile:
                (self._textfile.refresh if news_only else self._textfile.write)(self._sample())

    def close(self) -> None:
        """The process ends: the file in the run directory stays, the rest goes. Raises OSError."""
        if self._textfile:
            self._textfile.remove()
        if self._endpoint:
            self._endpoint.close()

    def close_in_child(self) -> None:
        """In a forked child: let the parent's port go."""
        if self._endpoint:
            self._endpoint.close_in_child()
