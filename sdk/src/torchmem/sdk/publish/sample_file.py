"""The file in which a process publishes its sample, in its user's directory."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from operator import attrgetter
from pathlib import Path

from torchmem.host.procfs import pid_namespace, start_ticks
from torchmem.sample.capture_messages import (
    CAPTURE_SUFFIXES,
    OOM_RECORDING_SUFFIX,
    OOM_SNAPSHOT_SUFFIX,
)
from torchmem.sample.memory_map import MAP_SUFFIX
from torchmem.sample.memory_map import REQUEST_SUFFIX as MAP_REQUEST_SUFFIX
from torchmem.sample.native_threads import sleep
from torchmem.sample.release_messages import RELEASE_SUFFIXES
from torchmem.sample.run_directory import (
    MAX_ENTRIES,
    REPORT_SUFFIX,
    RESERVE_SUFFIX,
    RUN_DIR_MODE,
    SAMPLE_SUFFIX,
    TEMPORARY_SUFFIX,
    is_user_directory,
    reserve_path,
    sample_name,
)
from torchmem.sample.sample import DeviceSample, Process, Sample, encode
from torchmem.sdk.publish.reserve import Reserve
from torchmem.sdk.safety.cost import HEARTBEAT_SECONDS
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.safety.interruptions import ignore, is_interruption

# How long the files of a process stay after the last write: if it has certainly ended (the exporter
# shows it for 15 minutes), and otherwise.
ENDED_FILE_SECONDS = 3600
STALE_FILE_SECONDS = 24 * 3600
TURN_SECONDS = 0.25
MIN_RESERVED_BYTES = 16 * 1024

_MAP_FILES = (MAP_SUFFIX, MAP_REQUEST_SUFFIX)
_FILES = (SAMPLE_SUFFIX, *CAPTURE_SUFFIXES, *RELEASE_SUFFIXES, OOM_SNAPSHOT_SUFFIX, *_MAP_FILES)
_SUFFIXES = "|".join(map(re.escape, _FILES))
_UNFINISHED = rf"-\d+{re.escape(REPORT_SUFFIX)}|{re.escape(OOM_RECORDING_SUFFIX)}|{_SUFFIXES}"
_SWEPT_NAME = re.compile(
    r"(?P<dot>\.)?(?P<namespace>\d+)-(?P<pid>\d+)-(?P<ticks>\d+)"
    rf"(?(dot)({_UNFINISHED})(\.\d+\.\d+{re.escape(TEMPORARY_SUFFIX)}|{re.escape(RESERVE_SUFFIX)}d?)"
    rf"|({_SUFFIXES}))"
)


class SampleFile:
    """This process's sample file in its user's directory."""

    @classmethod
    def of(cls, process: Process, run_dir: Path, errors: Errors) -> SampleFile:
        """Return the file of a process; its directory is created later if it cannot be now."""
        name = sample_name(process.pid, process.pid_namespace, process.start_ticks)
        directory = run_dir / str(os.geteuid())
        with errors.suppress("publish"):
            directory = make_user_directory(run_dir)
        return cls(directory, name)

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self.newest: Sample | None = None
        self.reserve = Reserve(reserve_path(self.path))

    def write(self, sample: Sample) -> None:
        """Replace the file; create the directories again if they have vanished. Raises OSError."""
        content = encode(sample)
        try:
            self.reserve.replace(self.path, content)
        except FileNotFoundError:
            restore_directory(self.path.parent)
            self.reserve.replace(self.path, content)
        self.reserve.keep(max(MIN_RESERVED_BYTES, 2 * len(content)))
        if self.newest is None:
            remove_stale_files(self.path.parent, time.time())
        self.newest = sample

    def refresh(self, sample: Sample) -> None:
        """Replace the file if the sample has changed or a heartbeat is due. Raises OSError."""
        if self.newest is None or _is_news(sample, self.newest):
            self.write(sample)


def _is_news(sample: Sample, old: Sample) -> bool:
    """Return whether more than clock, SDK cost and host memory changed, or `old` is too old."""
    return (
        sample.steps.count != old.steps.count
        or abs(sample.timestamp - old.timestamp) >= HEARTBEAT_SECONDS
        or sample.cost.errors != old.cost.errors
        or _news(sample) != _news(old)
        or len(sample.devices) != len(old.devices)
        or any(map(_is_device_news, sample.devices, old.devices))
    )


_NO_NEWS = {"timestamp", "steps", "cost", "devices", "host", "pinned"}
_news = attrgetter(*[field.name for field in fields(Sample) if field.name not in _NO_NEWS])
"""Returns the fields of which every change is news."""


def _is_device_news(device: DeviceSample, old: DeviceSample) -> bool:
    """Return whether more changed than the time at which the statistics were read."""
    if device is old:
        return False
    return replace(device, stats_timestamp=old.stats_timestamp) != old


def make_user_directory(run_dir: Path) -> Path:
    """Create this user's directory in the run directory, and the latter too, and return its path.

    If another user has taken its name, the directory has an unpredictable name, under
    which the user's other processes find it. Safe against other processes that do the same at the
    same time. Raises OSError.
    """
    mode = _user_directory_mode(run_dir)
    own = run_dir / str(os.geteuid())
    if _claim(own, mode):
        return own
    with _turn(run_dir):
        new = run_dir / f"{os.geteuid()}-{os.urandom(8).hex()}"
        for fallback in (*_own_fallbacks(run_dir), new):
            if _claim(fallback, mode):
                return fallback
    raise PermissionError(f"{run_dir} gives new directories another owner")


def _own_fallbacks(run_dir: Path) -> list[Path]:
    """Return the directories that this user's processes had to create under another name."""
    prefix, own = f"{os.geteuid()}-", []
    with os.scandir(run_dir) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            if entry.name.startswith(prefix) and is_user_directory(entry.name):
                with ignore(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        own.append(run_dir / entry.name)
    return sorted(own)


@contextmanager
def _turn(run_dir: Path) -> Iterator[None]:
    """Let processes enter one by one. Another user may hold the lock, so none waits for long."""
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + TURN_SECONDS
        while not _is_locked(descriptor) and time.monotonic() < end:
            sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Return whether this process has got the lock, which ends when the descriptor is closed."""
    with ignore(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def restore_directory(directory: Path) -> None:
    """Create a user's directory again at the same path if it has vanished. Raises OSError."""
    if not _claim(directory, _user_directory_mode(directory.parent)):
        raise PermissionError(f"{directory} belongs to another user")


def _user_directory_mode(run_dir: Path) -> int:
    """Create the run directory if needed; return the mode of users' directories in it.

    A set-group-ID run directory gives them the group of the exporter. Without one, only root and
    this user can be the exporter, unless the run directory belongs to another user.
    """
    make_run_directory(run_dir)
    status = run_dir.stat()
    if status.st_mode & stat.S_ISGID:
        return 0o750
    return 0o700 if status.st_uid in {0, os.geteuid()} else 0o755


def _claim(directory: Path, mode: int) -> bool:
    """Create the directory unless it exists; return whether it belongs to this user."""
    with ignore(FileExistsError):
        directory.mkdir(0o700)
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(directory, flags)
    except OSError as error:  # a link, a file, or another user's directory
        if is_interruption(error):
            raise
        return False
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            return False
        if status.st_mode & 0o777 != mode:
            os.fchmod(descriptor, mode)
        return True
    finally:
        os.close(descriptor)


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


def remove_stale_files(directory: Path, now: float) -> None:
    """Remove other processes' samples and captures in this user's directory, also unfinished ones.

    `now` is a Unix time and is compared with the time of the last write. Only files with exactly
    the names that this package gives are removed.
    """
    with ignore(OSError), os.scandir(directory) as entries:
        for entry in entries:
            match = _SWEPT_NAME.fullmatch(entry.name)
            if match:
                is_ended = _has_ended(*map(int, match.group("namespace", "pid", "ticks")))
                _remove_older(entry, now - (ENDED_FILE_SECONDS if is_ended else STALE_FILE_SECONDS))


def _has_ended(namespace: int, pid: int, ticks: int) -> bool:
    """Return whether the process has ended; False if unknown, as in another pid namespace."""
    return namespace == pid_namespace() and start_ticks(pid) != ticks


def _remove_older(entry: os.DirEntry[str], before: float) -> None:
    with ignore(OSError):
        status = entry.stat(follow_symlinks=False)
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if is_own and status.st_mtime < before:
            os.unlink(entry.path)  # noqa: PTH108 - an entry, not a Path
