"""Where a process publishes its sample: the run directory and, on request, textfile and port."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchmem.host.procfs import pid_namespace, start_ticks
from torchmem.sample.capture_messages import (
    CAPTURE_SUFFIXES,
    OOM_RECORDING_SUFFIX,
    OOM_SNAPSHOT_SUFFIX,
)
from torchmem.sample.errors import UsageError
from torchmem.sample.memory_map import MAP_SUFFIX
from torchmem.sample.memory_map import REQUEST_SUFFIX as MAP_REQUEST_SUFFIX
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
from torchmem.sdk.safety.interruptions import call_holding, ignore, is_interruption
from torchmem.sdk.settings import Settings

if TYPE_CHECKING:
    from torchmem.metrics.otlp import Push
    from torchmem.sdk.publish.endpoint import Endpoint
    from torchmem.sdk.publish.leader import Leader
    from torchmem.sdk.publish.outputs import Textfile

# How long the files of a process stay after the last write: of one that has certainly ended, which
# the exporter shows for 15 minutes, and of any other.
ENDED_FILE_SECONDS = 3600
STALE_FILE_SECONDS = 24 * 3600
LOCK_SECONDS = 1.0
TURN_SECONDS = 0.25
LAST_SEND_SECONDS = 0.5
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
    if (
        sample.steps.count != old.steps.count
        or abs(sample.timestamp - old.timestamp) >= HEARTBEAT_SECONDS
    ):
        return True
    cost = replace(old.cost, errors=sample.cost.errors)
    devices = _as_of(sample.devices, old.devices)
    unchanged = replace(
        sample,
        timestamp=old.timestamp,
        steps=old.steps,
        cost=cost,
        devices=devices,
        host=old.host,
        pinned=old.pinned,
    )
    return old != unchanged


def _as_of(
    devices: tuple[DeviceSample, ...], old: tuple[DeviceSample, ...]
) -> tuple[DeviceSample, ...]:
    """Return `devices` with the times at which the statistics of `old` were read."""
    if len(devices) != len(old):
        return devices
    return tuple(
        replace(device, stats_timestamp=before.stats_timestamp)
        for device, before in zip(devices, old, strict=True)
    )


def make_user_directory(run_dir: Path) -> Path:
    """Create this user's directory in the run directory, and the latter too, and return its path.

    If another user has taken its name, the directory has a name that cannot be foreseen, under
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
            time.sleep(0.01)
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
    """Return whether the process has ended; False in another pid namespace, where it is unknown."""
    return namespace == pid_namespace() and start_ticks(pid) != ticks


def _remove_older(entry: os.DirEntry[str], before: float) -> None:
    with ignore(OSError):
        status = entry.stat(follow_symlinks=False)
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if is_own and status.st_mtime < before:
            os.unlink(entry.path)  # noqa: PTH108 - an entry, not a Path


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
        self._leader: Leader | None = None
        self._push: Push | None = None
        self._sends = False
        self._hostname = process.hostname
        name = sample_name(process.pid, process.pid_namespace, process.start_ticks)
        self.file = SampleFile(self._make_directory(settings.directory(environment)), name)
        if settings.textfile is not None:
            from torchmem.sdk.publish.outputs import Textfile

            self._textfile = Textfile(settings.textfile)

    def _make_directory(self, run_dir: Path) -> Path:
        """Return this user's directory, which is created later if that is impossible now."""
        with self._errors.suppress("publish"):
            return make_user_directory(run_dir)
        return run_dir / str(os.geteuid())

    def open_endpoint(self) -> None:
        """Start to listen if the settings ask for a port."""
        with self._errors.suppress("endpoint"):
            if self._settings.port is not None and self._endpoint is None:
                from torchmem.sdk.publish.endpoint import Endpoint
                from torchmem.sdk.publish.outputs import registry
                from torchmem.sdk.publish.page import Page

                page = Page(registry(self._sample))
                self._endpoint = Endpoint.open(self._settings, self._local_rank, page, self._errors)

    def tick(self) -> None:
        """Do what would delay the training thread: the election, and the import of OTLP."""
        if self._endpoint and not self._endpoint.is_open:  # the script has closed its descriptor
            self._endpoint.close()
            self._endpoint = None
            self.open_endpoint()
        if self._settings.leader_port is not None:
            self._campaign(self._settings.leader_port)
        if self._settings.otlp and not self._sends:
            self._sends = True
            self._start_to_send()

    def _campaign(self, port: int) -> None:
        """Serve all of this user's processes on `port` unless another one does."""
        with self._errors.suppress("endpoint"):
            if self._leader is None:
                from torchmem.sdk.publish.leader import Leader

                directory, host = self.file.path.parent, self._hostname
                address = self._settings.address
                self._leader = Leader(directory, host, address, port, self._errors)
            self._leader.campaign()

    def _start_to_send(self) -> None:
        with self._errors.suppress("otlp"):
            try:
                from torchmem.sdk.publish.otlp import start
            except ModuleNotFoundError as error:
                raise UsageError("the setting otlp needs pip install 'torchmem[otlp]'.") from error
            self._push = start(self._sample, self._after_push)

    def _after_push(self, failure: Exception | None) -> None:
        if failure:
            self._errors.count("otlp", failure)

    @property
    def url(self) -> str | None:
        """URL of the endpoint, or None without one."""
        return self._endpoint.url if self._endpoint else None

    def publish(self, *, news_only: bool = False) -> None:
        """Write the current state to all files; with `news_only` only where it is due."""
        write_sample = self.file.refresh if news_only else self.file.write
        with self._errors.suppress("publish"):
            call_holding(self._lock, LOCK_SECONDS, lambda: write_sample(self._sample()))
        with self._errors.suppress("textfile"):
            if self._textfile:
                (self._textfile.refresh if news_only else self._textfile.write)(self._sample())

    def close(self) -> None:
        """Remove the textfile and close the ports; the sample file stays. Raises OSError."""
        self.file.reserve.release()
        if self._push:
            self._push.close(LAST_SEND_SECONDS)
        if self._textfile:
            self._textfile.remove()
        for server in (self._endpoint, self._leader):
            if server:
                server.close()

    def close_in_child(self) -> None:
        """Close the parent's ports in a forked child."""
        for server in (self._endpoint, self._leader):
            if server:
                server.close_in_child()
