"""Publishing files by atomic replace: the sample in the run directory, and node_exporter's textfile.

One process's own series as a private prometheus_client registry.

The process's series as a file for node_exporter's textfile collector.

The opt-in endpoint of one training process: the standard prometheus_client server on a private registry.

Where a process's state is published: its file in the run directory and, if asked for, a textfile and a port.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from torchmem.sample.capture_messages import SUFFIXES
from torchmem.sample.families import View, families
from torchmem.sample.run_directory import RUN_DIR_MODE, SAMPLE_SUFFIX, sample_name
from torchmem.sample.sample import Process, Sample, encode, living_state
from torchmem.sdk._errors import Errors
from torchmem.sdk._settings import Settings

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
    suffixes = (SAMPLE_SUFFIX, *SUFFIXES, TEMPORARY_SUFFIX)
    for path in (path for suffix in suffixes for path in directory.glob(f"*{suffix}")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.getuid() and status.st_mtime < before:
                path.unlink()


class _OwnSeries(Collector):
    def __init__(self, read: Callable[[], Sample]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        sample = self._read()
        state = sample.ended or living_state(sample, time.time())
        return families([View(sample, sample.process.pid, state, gpus={})])

    def describe(self) -> Iterable[Metric]:
        return []  # an empty description keeps registration from collecting


def registry(read: Callable[[], Sample]) -> CollectorRegistry:
    """A registry whose every collection calls `read`; the user's default registry is not touched."""
    private = CollectorRegistry(auto_describe=False)
    private.register(_OwnSeries(read))
    return private


# Rendering the series costs milliseconds, and node_exporter itself is rarely scraped more often.
REFRESH_SECONDS = 10.0


class Textfile:
    """One .prom file; a directory gets one file for each rank. Removed at a clean end, so nothing lives on in it."""

    def __init__(self, path: Path, rank: int) -> None:
        self._written = 0.0
        self.path = path if path.suffix == ".prom" else path / f"torchmem-rank{rank}.prom"

    def write(self, sample: Sample) -> None:
        """Replace the file; raises OSError when the directory cannot be written."""
        replace_file(self.path, generate_latest(registry(lambda: sample)))
        self._written = sample.timestamp

    def refresh(self, sample: Sample) -> None:
        """Replace the file when it has grown old; raises OSError when the directory cannot be written."""
        if abs(sample.timestamp - self._written) >= REFRESH_SECONDS:
            self.write(sample)

    def remove(self) -> None:
        """Remove the file; raises OSError."""
        self.path.unlink(missing_ok=True)


log = logging.getLogger("torchmem")


class Endpoint:
    """A running server; `url` is where Prometheus finds the series."""

    def __init__(self, server: WSGIServer, thread: Thread, address: str) -> None:
        self._server = server
        self._thread = thread
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{server.server_port}/metrics"

    @classmethod
    def open(cls, settings: Settings, local_rank: int, read: Callable[[], Sample]) -> Endpoint:
        """Listen on the port plus the local rank (port 0: any); when it is taken, on any free port.

        Raises OSError when the address cannot be used at all.
        """
        wanted = settings.port + local_rank if settings.port else 0
        try:
            return cls(
                *start_http_server(wanted, settings.address, registry(read)), settings.address
            )
        except (OSError, OverflowError) as error:
            if wanted == 0:
                raise
            endpoint = cls(
                *start_http_server(0, settings.address, registry(read)), settings.address
            )
            log.warning(
                "torchmem: port %d cannot be used (%s), serving %s instead",
                wanted,
                error,
                endpoint.url,
            )
            return endpoint

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1)

    def close_in_child(self) -> None:
        """In a forked child: drop the inherited socket, or scrapes would hang on it once the parent is gone."""
        with contextlib.suppress(OSError):
            socket.socket.close(self._server.socket)


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
            self._textfile = Textfile(settings.textfile, process.rank)

    def open_endpoint(self) -> None:
        """Listen where a port was asked for."""
        with self._errors.swallow("endpoint"):
            if self._settings.port is not None:
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
