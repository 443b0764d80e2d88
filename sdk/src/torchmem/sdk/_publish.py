"""Publishing files by atomic replace: the sample in the run directory, and node_exporter's textfile."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from dataclasses import replace
from pathlib import Path

from torchmem.core import capture
from torchmem.core.codec import encode
from torchmem.core.rundir import RUN_DIR_MODE, SAMPLE_SUFFIX
from torchmem.core.sample import Sample

# Without an exporter nobody removes the last words of processes long gone.
FORGOTTEN_AFTER_SECONDS = 24 * 3600
# An exporter that cannot see the process judges it by the age of its sample, after a minute.
HEARTBEAT_SECONDS = 15.0
TEMPORARY_SUFFIX = ".tmp"
_writes = itertools.count()


def temporary_beside(path: Path) -> Path:
    """A name of its own for each write: several threads may replace a file at once."""
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_writes)}{TEMPORARY_SUFFIX}")


def replace_file(path: Path, content: bytes) -> None:
    """Write `path` so that a reader sees the old or the new content, never a part; readable by everyone.

    Raises OSError when the directory cannot be written.
    """
    temporary = temporary_beside(path)
    try:
        _write_new(temporary, content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_new(path: Path, content: bytes) -> None:
    descriptor = _create(path)
    try:
        os.fchmod(descriptor, 0o644)  # the exporter may be another user, and umask may say 077
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def _create(path: Path) -> int:
    """Descriptor of a file that is certainly new, whatever was left or put in its place."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileExistsError:
        path.unlink()
        return os.open(path, flags, 0o644)


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
    if sample.steps.count != old.steps.count or abs(sample.timestamp - old.timestamp) >= HEARTBEAT_SECONDS:
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
    suffixes = (SAMPLE_SUFFIX, *capture.SUFFIXES, TEMPORARY_SUFFIX)
    for path in (path for suffix in suffixes for path in directory.glob(f"*{suffix}")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_mtime < before:
                path.unlink()
