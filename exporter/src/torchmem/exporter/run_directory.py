"""The run directory as the exporter reads it: the newest valid sample of every process.

Any user may write to the directory, so nothing in it is trusted: links and special files are not
opened, sizes and counts are bounded, and JSON is decoded strictly. Every file that is rejected is
counted by reason.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from torchmem.sample.process_table import ProcessKey, ProcessStatus, ProcessTable, process_key
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES, SAMPLE_SUFFIX
from torchmem.sample.sample import (
    FREE_BLOCK_BOUNDS,
    LIVE_STATES,
    SCHEMA_VERSION,
    STEP_DURATION_BOUNDS,
    Layout,
    Sample,
    State,
    distinct_devices,
    live_state,
)
from torchmem.sample.untrusted import UntrustedFileError, read_untrusted, sanitize_json

DEFAULT_TTL_SECONDS = 900.0
MAX_ENTRIES = 16384  # directory entries that one scrape looks at
MAX_FILES_PER_USER = 1024
MAX_DEVICES_PER_USER = 2048
MAX_PID = 1 << 22  # PID_MAX_LIMIT of Linux, include/linux/threads.h
MAX_HIDDEN_SILENCE_SECONDS = 60.0

Reason = Literal[
    "not_regular",  # symlink, FIFO, socket, device, directory
    "unreadable",  # permission or I/O error
    "too_large",  # more than MAX_SAMPLE_BYTES
    "malformed",  # not JSON, or not a sample
    "unknown_schema",  # written by another version of torchmem
    "out_of_bounds",  # negative, not finite, too long or contradictory values
    "foreign_owner",  # the file's owner is not the owner of the process it names
    "too_many",  # more files or devices than one user may publish
    "duplicate",  # another file has the same rank, pid and run
]
REASONS: tuple[Reason, ...] = get_args(Reason)


class RejectedSampleError(Exception):
    """A file that is not used as a sample."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class Published:
    """One process to export, with its newest sample.

    `pid` is the pid in the exporter's own pid namespace. `attributed` is True when the process
    with that pid is certain to be the one that wrote the sample.
    """

    sample: Sample
    pid: int
    state: State
    attributed: bool


@dataclass(frozen=True, slots=True)
class _FileVersion:
    """One version of one file, identified by its change time (ctime), which users cannot set."""

    name: str
    inode: int
    size: int
    changed_ns: int
    mtime: float
    uid: int
    regular: bool

    @classmethod
    def of(cls, name: str, status: os.stat_result) -> _FileVersion:
        return cls(
            name,
            status.st_ino,
            status.st_size,
            status.st_ctime_ns,
            status.st_mtime,
            status.st_uid,
            stat.S_ISREG(status.st_mode),
        )


@dataclass(frozen=True, slots=True)
class _File:
    version: _FileVersion
    sample: Sample


class RunDirectory:
    """Reads the run directory at each scrape. A file that has not changed is not read again.

    The final values of a process that ended are kept until `ttl_seconds` after the process was
    last seen; then its file is removed.
    """

    def __init__(
        self,
        path: Path,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        processes: ProcessTable | None = None,
    ) -> None:
        self.path = path
        self._ttl_seconds = ttl_seconds
        self._processes = processes or ProcessTable()
        self._decoded: dict[str, tuple[_FileVersion, Sample | None]] = {}
        self._rejected: dict[str, _FileVersion] = {}
        self._last_seen: dict[ProcessKey, float] = {}
        self._rejections: dict[Reason, int] = dict.fromkeys(REASONS, 0)

    @property
    def namespace(self) -> int | None:
        """The pid namespace of the pids that `read` returns."""
        return self._processes.namespace

    @property
    def rejections(self) -> Mapping[Reason, int]:
        """Number of rejected file versions by reason since the exporter started."""
        return self._rejections

    def read(self, now: float) -> list[Published]:
        """Return every process to export at `now` (Unix seconds).

        Raises OSError when the directory cannot be read; a missing directory is empty.
        """
        with _open_directory(self.path) as directory:
            if directory is None:
                return []
            versions = _scan(directory)
            self._forget_all_but({version.name for version in versions})
            files = list(self._load_all(directory, versions))
            published = [
                (file.version, item)
                for file in files
                if (item := self._publish(directory, file, now)) is not None
            ]
        self._processes.forget_all_but({process_key(file.sample.process) for file in files})
        return self._without_duplicates(published)

    def _load_all(self, directory: int, versions: Iterable[_FileVersion]) -> Iterable[_File]:
        """Yield the valid samples within each user's limits, newest first."""
        files_of, devices_of = Counter[int](), Counter[int]()
        for version in versions:
            files_of[version.uid] += 1
            if files_of[version.uid] > MAX_FILES_PER_USER:
                self._reject(version, "too_many")
                continue
            file = self._load(directory, version)
            if file is None:
                continue
            devices_of[file.version.uid] += len(file.sample.devices)
            if devices_of[file.version.uid] > MAX_DEVICES_PER_USER:
                self._reject(file.version, "too_many")
                continue
            yield file

    def _load(self, directory: int, listed: _FileVersion) -> _File | None:
        version, sample = self._decoded.get(listed.name, (None, None))
        if version != listed:
            version, sample = self._decode(directory, listed)
            self._decoded[listed.name] = version, sample
        return None if sample is None or version is None else _File(version, sample)

    def _decode(self, directory: int, listed: _FileVersion) -> tuple[_FileVersion, Sample | None]:
        version = listed
        try:
            version, data = _read(directory, listed)
            return version, decode(data)
        except RejectedSampleError as error:
            self._reject(version, error.reason)
        except FileNotFoundError:
            pass
        return version, None

    def _publish(self, directory: int, file: _File, now: float) -> Published | None:
        """Return the process of one file, or None if it is rejected or its time to live is over."""
        process, version = file.sample.process, file.version
        status = self._processes.locate(process)
        if status.alive and self._processes.owner(status.pid) not in {None, version.uid}:
            self._reject(version, "foreign_owner")
            return None
        written = min(file.sample.timestamp, version.mtime)
        state = process_state(file.sample, status, now, now - written)
        key = process_key(process)
        if state in LIVE_STATES:
            self._last_seen[key] = now
        elif now - max(version.mtime, self._last_seen.get(key, 0.0)) > self._ttl_seconds:
            with contextlib.suppress(OSError):
                os.unlink(version.name, dir_fd=directory)
            return None
        attributed = bool(status.alive) and status.certain
        return Published(file.sample, status.pid, state, attributed)

    def _without_duplicates(
        self, published: list[tuple[_FileVersion, Published]]
    ) -> list[Published]:
        """Keep one process for each (rank, pid, run), because two would be the same series twice.

        A process that is known to be alive comes first, then the newest sample.
        """
        chosen: dict[tuple[int, int, str], Published] = {}
        for version, item in sorted(
            published, key=lambda pair: (not pair[1].attributed, -pair[1].sample.timestamp)
        ):
            process = item.sample.process
            key = (process.rank, item.pid, process.run)
            if key in chosen:
                self._reject(version, "duplicate")
            chosen.setdefault(key, item)
        return list(chosen.values())

    def _reject(self, version: _FileVersion, reason: Reason) -> None:
        """Count each version of a file once, not at every scrape."""
        if self._rejected.get(version.name) != version:
            self._rejected[version.name] = version
            self._rejections[reason] += 1

    def _forget_all_but(self, names: set[str]) -> None:
        self._decoded = {name: entry for name, entry in self._decoded.items() if name in names}
        self._rejected = {
            name: version for name, version in self._rejected.items() if name in names
        }
        known = {
            process_key(sample.process)
            for _, sample in self._decoded.values()
            if sample is not None
        }
        self._last_seen = {key: seen for key, seen in self._last_seen.items() if key in known}


def process_state(
    sample: Sample, status: ProcessStatus, now: float, silent_seconds: float
) -> State:
    """Return what the process is doing, or how it ended.

    An ending that the process recorded itself counts first. Without one, a live process is
    running or stalled, and so is a hidden one that wrote within MAX_HIDDEN_SILENCE_SECONDS. Any
    other process ended in an OutOfMemoryError if one was pending, and was killed otherwise.
    `now` is in Unix seconds; `silent_seconds` is the time since the process last wrote.
    """
    if sample.ended is not None:
        return sample.ended
    hidden = status.alive is None
    if status.alive or (hidden and silent_seconds < MAX_HIDDEN_SILENCE_SECONDS):
        return live_state(sample, now)
    return "oom" if sample.oom_pending else "killed"


def decode(data: bytes) -> Sample:
    """Decode a sample file: strict types, bounded sizes and numbers, sanitized text.

    Raises RejectedSampleError for anything that a healthy SDK of this schema does not write.
    """
    try:
        raw = msgspec.json.decode(data)
        if isinstance(raw, dict) and raw.get("schema") != SCHEMA_VERSION:
            raise RejectedSampleError("unknown_schema")
        sample = msgspec.convert(_sanitized(raw), Sample, strict=True)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RejectedSampleError("malformed") from error
    if not _is_consistent(sample):
        raise RejectedSampleError("out_of_bounds")
    return replace(sample, devices=distinct_devices(sample.devices))


def _sanitized(raw: Any) -> Any:
    try:
        return sanitize_json(raw)
    except ValueError as error:
        raise RejectedSampleError("out_of_bounds") from error


def _is_consistent(sample: Sample) -> bool:
    return (
        0 < sample.process.pid <= MAX_PID
        and len(sample.steps.duration_counts) == len(STEP_DURATION_BOUNDS) + 1
        and all(_is_plausible(device.layout) for device in sample.devices if device.layout)
    )


def _is_plausible(layout: Layout) -> bool:
    complete = len(layout.free_block_counts) == len(FREE_BLOCK_BOUNDS) + 1
    return complete and layout.largest_free_block_bytes <= layout.free_bytes


@contextmanager
def _open_directory(path: Path) -> Iterator[int | None]:
    """Yield a file descriptor of the directory, or None if it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _scan(directory: int) -> list[_FileVersion]:
    """Return every sample file among the first MAX_ENTRIES directory entries, newest first."""
    versions = []
    with os.scandir(directory) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            if entry.name.endswith(SAMPLE_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    versions.append(_FileVersion.of(entry.name, status))
    return sorted(versions, key=lambda version: version.changed_ns, reverse=True)


def _read(directory: int, listed: _FileVersion) -> tuple[_FileVersion, bytes]:
    """Return the file's current version and content.

    Raises RejectedSampleError, or FileNotFoundError when the file is gone.
    """
    if not listed.regular:
        raise RejectedSampleError("not_regular")
    try:
        data, status = read_untrusted(listed.name, MAX_SAMPLE_BYTES, directory=directory)
    except UntrustedFileError as error:
        raise RejectedSampleError(error.problem) from error
    return _FileVersion.of(listed.name, status), data
