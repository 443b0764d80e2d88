"""The setting `leader_port`: of a user's processes on one host, one serves the series of all.

It is for pods and nodes without an exporter. A lock in their directory decides: the process that
holds it serves what all of them have published there. When it ends for any reason, the kernel
releases lock and port, and another process takes both within seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from prometheus_client import CollectorRegistry

from torchmem.host.process_table import ProcessTable, process_key, process_state
from torchmem.metrics.families import ProcessView
from torchmem.sample.run_directory import DEFAULT_TTL_SECONDS, MAX_USER_ENTRIES, SAMPLE_SUFFIX
from torchmem.sample.sample import LIVE_STATES, read_sample
from torchmem.sdk.publish.descriptors import Descriptor
from torchmem.sdk.publish.endpoint import Endpoint
from torchmem.sdk.publish.outputs import registry_of
from torchmem.sdk.publish.page import Page
from torchmem.sdk.safety.errors import Errors, log

LOCK_NAME = "leader.lock"
# Files that a leader reads for one scrape; the newest ones.
MAX_PROCESSES = 128
# Failed attempts to open the port before an error is reported: a leader that was just killed may
# still hold it.
MAX_QUIET_ATTEMPTS = 3


class Leader:
    """This process's part in the election. `url` is what it serves, None while another leads.

    `directory` is the user's directory in the run directory; only processes with this `hostname`
    are served, because a directory on a shared volume may hold those of other pods.
    """

    def __init__(
        self, directory: Path, hostname: str, address: str, port: int, errors: Errors
    ) -> None:
        self._directory = directory
        self._hostname = hostname
        self._address = address
        self._port = port
        self._errors = errors
        self._lock: Descriptor | None = None
        self._endpoint: Endpoint | None = None
        self._attempts = 0
        self._closed = False

    @property
    def url(self) -> str | None:
        """Address that this process serves, None unless it is the leader."""
        return self._endpoint.url if self._endpoint else None

    def campaign(self) -> None:
        """Become the leader unless there is one; call it repeatedly.

        Raises OSError if the lock cannot be used, and once if another program has the port.
        """
        if self._endpoint and not self._endpoint.is_open:  # the script has closed its descriptor
            self._endpoint.close()
            self._endpoint = None
        if self._endpoint or self._closed or not self._holds_lock():
            return
        self._attempts += 1
        try:
            Endpoint.listen(
                self._port,
                self._address,
                Page(registry(self._directory, self._hostname)),
                self._errors,
                kept=self._keep,
            )
        except OSError as error:
            if self._attempts == MAX_QUIET_ATTEMPTS:
                raise OSError(
                    f"cannot serve on {self._address}:{self._port}, and tries again: {error}"
                ) from error
        else:
            self._attempts = 0
            log(logging.INFO, "torchmem: serving this user's processes on %s", self.url)

    def _keep(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def close(self) -> None:
        """Stop serving and let another process lead."""
        self._closed = True
        if self._endpoint:
            self._endpoint.close()
            self._endpoint = None
        self._release_lock()

    def _holds_lock(self) -> bool:
        """Return whether this process holds the lock, after trying to get it."""
        if self._lock is not None and self._lock.is_open:
            return True
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._directory / LOCK_NAME, flags, 0o600)
        try:
            # One byte of the file for each host and port.
            place = crc32(f"{self._hostname}:{self._port}".encode())
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError | PermissionError):  # EAGAIN or EACCES: held
                return False
            raise
        self._lock = Descriptor(descriptor)
        # A child does not inherit POSIX locks, but would lose its own with this descriptor.
        self._lock.close_in_children()
        return True

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def registry(directory: Path, hostname: str) -> CollectorRegistry:
    """Return a registry that reads `directory` at every collection."""
    return registry_of(_HostProcesses(directory, hostname).views)


class _HostProcesses:
    """All processes in one directory that run on this host."""

    def __init__(self, directory: Path, hostname: str) -> None:
        self._directory = directory
        self._hostname = hostname
        self._processes = ProcessTable()

    def views(self) -> list[ProcessView]:
        """Read the directory."""
        views = list(self._read(time.time()))
        self._processes.forget_all_but({process_key(view.sample.process) for view in views})
        return list(distinct(views))

    def _read(self, now: float) -> Iterator[ProcessView]:
        """Yield the processes that run, or ended within the time to live; the newest first."""
        for path, written in _newest_files(self._directory):
            sample = read_sample(path, os.geteuid())
            if sample is None or sample.process.hostname != self._hostname:
                continue
            status = self._processes.locate(sample.process)
            state = process_state(sample, status, now, now - min(sample.timestamp, written))
            if state in LIVE_STATES or now - written <= DEFAULT_TTL_SECONDS:
                yield ProcessView(sample, status.pid, state, gpus={})


def distinct(views: Iterable[ProcessView]) -> Iterator[ProcessView]:
    """Yield views with distinct labels (rank, pid, run), live processes first.

    Of several live processes with the same labels, which are in different containers, all but the
    first have the pid namespace in their label `pid`. A process that ended is left out if another
    one has its labels.
    """
    taken: set[tuple[str, ...]] = set()
    for view in sorted(views, key=lambda view: view.state not in LIVE_STATES):
        candidate = view
        if view.labels in taken and view.state in LIVE_STATES:
            pid = f"{view.pid}@{view.sample.process.pid_namespace or 0}"
            candidate = replace(view, pid=pid)
        if candidate.labels not in taken:
            taken.add(candidate.labels)
            yield candidate


def _newest_files(directory: Path) -> list[tuple[Path, float]]:
    """Return at most MAX_PROCESSES sample files with the times of their last writes."""
    found = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for _, entry in zip(range(MAX_USER_ENTRIES), entries, strict=False):
            if entry.name.endswith(SAMPLE_SUFFIX):
                with contextlib.suppress(OSError):
                    found.append((Path(entry.path), entry.stat(follow_symlinks=False).st_mtime))
    return sorted(found, key=lambda file: -file[1])[:MAX_PROCESSES]
