"""The run directory as the exporter reads it: the newest valid sample of every process.

Any user may write to the run directory, so nothing in it is trusted. The exporter reads only files
that their owner alone could have put there: those in a directory to which only its owner may write,
and that belong to the same user. Links and special files are not opened, sizes and counts are
bounded for each user (`budgets`), and JSON is decoded strictly. Every file that is rejected is
counted by reason, and the first of each reason and user is logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from torchmem.exporter.budgets import (
    MAX_PAGE_BYTES_PER_FILE_BYTE,
    Budget,
    page_cost,
)
from torchmem.exporter.directory_status import (
    OVERFLOW_UID,
    PROBLEM_TEXTS,
    DirectoryStatus,
    can_appear,
    directory_status,
)
from torchmem.exporter.rejections import Reason, Refusals, RejectedSampleError
from torchmem.sample.process_table import ProcessKey, ProcessTable, process_key, process_state
from torchmem.sample.run_directory import (
    DEFAULT_TTL_SECONDS,
    MAX_ENTRIES,
    MAX_SAMPLE_BYTES,
    MAX_USER_ENTRIES,
    SAMPLE_SUFFIX,
    is_user_directory,
)
from torchmem.sample.sample import (
    FREE_BLOCK_BOUNDS,
    LIVE_STATES,
    MAX_COMPONENTS,
    SCHEMA_VERSION,
    STEP_DURATION_BOUNDS,
    DeviceSample,
    Layout,
    Sample,
    State,
    distinct_devices,
)
from torchmem.sample.untrusted import (
    UntrustedFileError,
    open_untrusted_directory,
    read_untrusted,
    sanitize_json,
)

_log = logging.getLogger(__name__)

MAX_USERS = 256
MAX_DIRECTORIES_PER_USER = 64
MAX_OLD_FILES = 4096  # of processes with an older torchmem, in the run directory itself
MAX_PID = 1 << 22  # PID_MAX_LIMIT of Linux, include/linux/threads.h


@dataclass(frozen=True, slots=True)
class Published:
    """One process to export, with its newest sample.

    `pid` is the pid in the exporter's own pid namespace. `attributed` is True when the process
    with that pid is certain to be the one that wrote the sample. `pid_label` is the label `pid`
    where that number is not unique: pid, pid namespace and user. `uid` is the user who owns the
    sample file, None if unknown; `path` is that of the file in the run directory.
    """

    sample: Sample
    pid: int
    state: State
    attributed: bool
    pid_label: str | None = None
    uid: int | None = None
    path: str = ""

    @property
    def id(self) -> str:
        """16 hex digits that name the process in URLs; equal after a restart of the exporter."""
        return blake2b(os.fsencode(self.path), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class _FileVersion:
    """One version of one file, identified by its change time (ctime), which users cannot set.

    `directory` is the name of the user's directory, empty for the run directory itself. `user`
    names the owner, or in a user namespace that does not map the owner, the directory.
    """

    directory: str
    name: str
    inode: int
    size: int
    changed_ns: int
    mtime: float
    uid: int
    regular: bool

    @classmethod
    def of(cls, directory: str, name: str, status: os.stat_result) -> _FileVersion:
        return cls(
            directory,
            name,
            status.st_ino,
            status.st_size,
            status.st_ctime_ns,
            status.st_mtime,
            status.st_uid,
            stat.S_ISREG(status.st_mode),
        )

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.name}" if self.directory else self.name

    @property
    def user(self) -> str:
        return self.directory if self.uid == OVERFLOW_UID and self.directory else str(self.uid)


@dataclass(frozen=True, slots=True)
class _File:
    """A decoded file. `seen`: when this version was first read; `cost`: its series and bytes."""

    version: _FileVersion
    sample: Sample
    seen: float
    cost: tuple[int, int] | None = None

    @property
    def written(self) -> float:
        """When it was written, in Unix seconds; never later than it was first read."""
        return min(self.version.mtime, self.version.changed_ns / 1e9, self.seen)


_Claimant = tuple[str, int | None]
"""User and pid namespace of a process."""
_Identity = tuple[int, str, str]
"""Labels rank, pid and run."""


class RunDirectory:
    """Reads the run directory at each scrape. A file that has not changed is not read again.

    The final values of a process that ended are kept until `ttl_seconds` after the process was
    last seen. The file itself is left to its owner, whose next process removes it.
    """

    def __init__(
        self,
        path: Path,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        processes: ProcessTable | None = None,
    ) -> None:
        self.path = path
        self.status = DirectoryStatus()
        self._ttl_seconds = ttl_seconds
        self._processes = processes or ProcessTable()
        self._files: dict[str, tuple[_FileVersion, _File | None]] = {}
        self._last_seen: dict[tuple[str, ProcessKey], float] = {}
        self._users: dict[str, None] = {}
        self._owners: dict[tuple[str, int], int] = {}
        self._holders: dict[_Identity, str] = {}
        self._refusals = Refusals()

    @property
    def namespace(self) -> int | None:
        """The pid namespace of the pids that `read` returns."""
        return self._processes.namespace

    @property
    def rejections(self) -> Mapping[Reason, int]:
        """Number of rejected file versions by reason since the exporter started."""
        return self._refusals.counts

    def read(self, now: float) -> list[Published]:
        """Return every process to export at `now` (Unix seconds).

        Raises OSError when the directory cannot be read; a missing directory is empty.
        """
        with self._open() as directory:
            if directory is None:
                return []
            versions = self._list(directory)
            self._forget_all_but(
                {version.path for listed in versions.values() for version in listed}
            )
            published = list(self._publish_all(directory, versions, now))
        known = (file.sample.process for _, file in self._files.values() if file)
        self._processes.forget_all_but(set(map(process_key, known)))
        self._refusals.end_scan()
        return self._without_duplicates(published)

    @contextmanager
    def _open(self) -> Iterator[int | None]:
        """Yield a descriptor of the run directory, or None if it is missing; set `status`."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._set_status(DirectoryStatus(None if can_appear(self.path) else "missing"))
            self._forget_all_but(set())
            yield None
            return
        except OSError:
            self._set_status(DirectoryStatus("unreadable"))
            raise
        try:
            self._set_status(directory_status(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)

    def _set_status(self, status: DirectoryStatus) -> None:
        if status.problem and status.problem != self.status.problem:
            _log.warning("run directory %s: %s", self.path, PROBLEM_TEXTS[status.problem])
        self.status = status

    def _list(self, directory: int) -> dict[str, list[_FileVersion]]:
        """Return the sample files of each user, newest first."""
        listed: dict[str, list[_FileVersion]] = {}
        for version in self._scan(directory):
            listed.setdefault(version.user, []).append(version)
        self._users = {user: None for user in (*self._users, *listed) if user in listed}
        for user in islice(self._users, MAX_USERS, None):
            version = listed.pop(user)[0]
            self._refusals.exceed(version.path, version.uid, "too_many")
        self._users = dict.fromkeys(islice(self._users, MAX_USERS))
        for versions in listed.values():
            versions.sort(key=lambda version: version.changed_ns, reverse=True)
        return listed

    def _scan(self, directory: int) -> Iterator[_FileVersion]:
        """Yield every sample file that its owner alone could have put there."""
        old, names = list[os.DirEntry[str]](), dict[tuple[str, int], os.DirEntry[str]]()
        with os.scandir(directory) as entries:
            for entry in islice(entries, MAX_ENTRIES):
                if is_user_directory(entry.name):
                    names[entry.name, entry.inode()] = entry
                elif entry.name.endswith(SAMPLE_SUFFIX) and len(old) < MAX_OLD_FILES:
                    old.append(entry)
            yield from _versions("", old)
            self._owners = {key: owner for key, owner in self._owners.items() if key in names}
            directories = self._directories(names)
        for name, owner in directories:
            yield from self._scan_user(directory, name, owner)

    def _directories(
        self, names: Mapping[tuple[str, int], os.DirEntry[str]]
    ) -> list[tuple[str, int]]:
        """Return each user's directories within the limit, the one with the user's name first."""
        for key, entry in names.items():
            if key not in self._owners:
                with contextlib.suppress(OSError):
                    self._owners[key] = entry.stat(follow_symlinks=False).st_uid
        count = Counter[int]()
        chosen = []
        ordered = sorted(self._owners.items(), key=lambda item: (item[0][0] != str(item[1]), item))
        for key, owner in ordered:
            count[owner] += 1
            if owner == OVERFLOW_UID or count[owner] <= MAX_DIRECTORIES_PER_USER:
                chosen.append((key[0], owner))
            else:
                self._refusals.exceed(key[0], owner, "too_many")
        return chosen

    def _scan_user(self, directory: int, name: str, owner: int) -> list[_FileVersion]:
        """Return the sample files in a user's directory that belong to the same user."""
        try:
            with (
                open_untrusted_directory(name, directory=directory) as (descriptor, status),
                os.scandir(descriptor) as entries,
            ):
                samples = (item for item in entries if item.name.endswith(SAMPLE_SUFFIX))
                versions = list(_versions(name, islice(samples, MAX_USER_ENTRIES)))
        except UntrustedFileError as error:
            self._refusals.once(name, owner, error.problem, error.problem)
            return []
        except OSError:  # removed in the meantime
            return []
        for version in versions:
            if version.uid != status.st_uid:
                self._reject(version, "foreign_owner")
        return [version for version in versions if version.uid == status.st_uid]

    def _publish_all(
        self, directory: int, listed: Mapping[str, list[_FileVersion]], now: float
    ) -> Iterator[tuple[_File, Published]]:
        """Yield the processes within each user's budget; users who publish least come first."""
        node = Budget.of_node()
        users = sorted(listed.values(), key=_total_bytes)
        for position, versions in enumerate(users):
            budget = node.share(len(users) - position)
            given = replace(budget)
            yield from self._publish_user(directory, versions, budget, now)
            node.take_all(budget, given)

    def _publish_user(
        self, directory: int, versions: Iterable[_FileVersion], budget: Budget, now: float
    ) -> Iterator[tuple[_File, Published]]:
        """Yield the processes of one user, newest first, up to the first one beyond the budget.

        Files after that one are not read, so that no user's files take up the time of a scrape.
        """
        is_small = budget.take(
            {"page_bytes": _total_bytes(versions) * MAX_PAGE_BYTES_PER_FILE_BYTE}
        )
        reason: Reason | None = None
        for version in versions:
            reason = reason or self._refuse_unread(version, budget)
            file = None if reason else self._load(directory, version, now)
            item = self._publish(directory, file, now) if file else None
            if file and item:
                reason = self._refuse_read(file, budget, is_small=is_small)
            if reason and now - version.changed_ns / 1e9 <= self._ttl_seconds:
                self._refusals.exceed(version.path, version.uid, reason)
            elif file and item and not reason:
                yield file, item

    @staticmethod
    def _refuse_unread(version: _FileVersion, budget: Budget) -> Reason | None:
        """Take what reading the file costs, or return why it is not read."""
        if not budget.take({"files": 1}):
            return "too_many"
        is_within = budget.take({"file_bytes": min(version.size, MAX_SAMPLE_BYTES)})
        return None if is_within else "over_budget"

    def _refuse_read(self, file: _File, budget: Budget, *, is_small: bool) -> Reason | None:
        """Take what the process costs on the page, or return why it is not exported."""
        if not budget.take({"devices": len(file.sample.devices)}):
            return "too_many"
        return None if is_small or self._take_page(file, budget) else "over_budget"

    def _take_page(self, file: _File, budget: Budget) -> bool:
        """Take what the sample costs on the page, which is measured once for each version."""
        if file.cost is None:
            file = replace(file, cost=page_cost(file.sample))
            self._files[file.version.path] = file.version, file
        assert file.cost is not None  # noqa: S101 - set above
        series, size = file.cost
        return budget.take({"series": series, "page_bytes": size})

    def _load(self, directory: int, listed: _FileVersion, now: float) -> _File | None:
        version, file = self._files.get(listed.path, (None, None))
        if version != listed:
            version, file = self._decode(directory, listed, now)
            self._files[listed.path] = version, file
        return file

    def _decode(
        self, directory: int, listed: _FileVersion, now: float
    ) -> tuple[_FileVersion, _File | None]:
        version = listed
        try:
            version, data = _read(directory, listed)
            return version, _File(version, not_after(decode(data), now), now)
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
        silent_seconds = now - min(file.sample.timestamp, file.written)
        state = process_state(file.sample, status, now, silent_seconds)
        key = version.user, process_key(process)
        if state in LIVE_STATES:
            self._last_seen[key] = now
        elif now - max(file.written, self._last_seen.get(key, 0.0)) > self._ttl_seconds:
            self._files[version.path] = version, None
            _remove_old(directory, version)
            return None
        attributed = bool(status.alive) and status.certain
        uid = None if version.uid == OVERFLOW_UID else version.uid
        return Published(file.sample, status.pid, state, attributed, uid=uid, path=version.path)

    def _without_duplicates(self, published: list[tuple[_File, Published]]) -> list[Published]:
        """Return processes with distinct labels (rank, pid, run): two would be one series twice.

        Of several processes with equal labels in different pid namespaces or of different users,
        one keeps them: one that is known to be alive, else one of the user who has had them so far,
        else the one that started first, so that a new exporter chooses the same. The others get a
        longer label `pid`.
        """

        def precedence(pair: tuple[_File, Published]) -> tuple[bool, bool, tuple[float, int]]:
            file, item = pair
            is_holder = self._holders.get(_identity(item)) == file.version.user
            return not item.attributed, not is_holder, _start_order(item)

        holders: dict[_Identity, _Claimant] = {}
        chosen: list[Published] = []
        for file, candidate in sorted(self._newest(published), key=precedence):
            item, claimant = candidate, _claimant(file)
            if holders.setdefault(_identity(item), claimant) != claimant:
                item = replace(item, pid_label=_long_pid(item.pid, claimant))
            chosen.append(item)
        self._holders = {identity: user for identity, (user, _) in holders.items()}
        return chosen

    def _newest(
        self, published: Iterable[tuple[_File, Published]]
    ) -> Iterable[tuple[_File, Published]]:
        """Leave one of several processes with equal labels in a user's pid namespace.

        It is the one that is known to be alive, else the newest.
        """
        newest: dict[tuple[_Identity, _Claimant], tuple[_File, Published]] = {}
        for file, item in sorted(
            published, key=lambda pair: (not pair[1].attributed, -pair[1].sample.timestamp)
        ):
            key = _identity(item), _claimant(file)
            if key in newest:
                self._reject(file.version, "duplicate")
            newest.setdefault(key, (file, item))
        return newest.values()

    def _reject(self, version: _FileVersion, reason: Reason) -> None:
        """Count each version of a file once, not at every scrape."""
        self._refusals.once(version.path, version.uid, reason, version)

    def _forget_all_but(self, paths: set[str]) -> None:
        self._files = {path: entry for path, entry in self._files.items() if path in paths}
        self._refusals.forget_all_but(paths)
        known = {
            (file.version.user, process_key(file.sample.process))
            for _, file in self._files.values()
            if file is not None
        }
        self._last_seen = {key: seen for key, seen in self._last_seen.items() if key in known}


def _total_bytes(versions: Iterable[_FileVersion]) -> int:
    return sum(min(version.size, MAX_SAMPLE_BYTES) for version in versions)


def _identity(item: Published) -> _Identity:
    process = item.sample.process
    return process.rank, item.pid_label or str(item.pid), process.run


def _claimant(file: _File) -> _Claimant:
    return file.version.user, file.sample.process.pid_namespace


def _start_order(item: Published) -> tuple[float, int]:
    """Return the start of the process since boot and its pid namespace; unknown starts are last."""
    ticks, namespace = item.sample.process.start_ticks, item.sample.process.pid_namespace
    return float("inf") if ticks is None else ticks, namespace or 0


def _long_pid(pid: int, claimant: _Claimant) -> str:
    user, namespace = claimant
    return f"{pid}@{namespace or 0}-{user}"


def _remove_old(directory: int, version: _FileVersion) -> None:
    """Remove a file of an older torchmem, which the exporter can do as the directory's owner."""
    if not version.directory:
        with contextlib.suppress(OSError):
            os.unlink(version.name, dir_fd=directory)


def not_after(sample: Sample, now: float) -> Sample:
    """Return the sample with no time later than `now`, in Unix seconds."""
    steps = sample.steps
    if steps.last_timestamp is not None and steps.last_timestamp > now:
        steps = replace(steps, last_timestamp=now)
    if steps.progress_timestamp is not None and steps.progress_timestamp > now:
        steps = replace(steps, progress_timestamp=now)
    process = sample.process
    if process.start_timestamp is not None and process.start_timestamp > now:
        process = replace(process, start_timestamp=now)
    return replace(
        sample,
        timestamp=min(sample.timestamp, now),
        process=process,
        steps=steps,
        devices=tuple(_device_not_after(device, now) for device in sample.devices),
    )


def _device_not_after(device: DeviceSample, now: float) -> DeviceSample:
    if device.layout and device.layout.timestamp > now:
        device = replace(device, layout=replace(device.layout, timestamp=now))
    if device.component_peak_timestamp and device.component_peak_timestamp > now:
        device = replace(device, component_peak_timestamp=now)
    if device.last_oom and device.last_oom.timestamp > now:
        device = replace(device, last_oom=replace(device.last_oom, timestamp=now))
    if device.stats_timestamp is not None and device.stats_timestamp > now:
        device = replace(device, stats_timestamp=now)
    if device.first_read and device.first_read.timestamp > now:
        device = replace(device, first_read=replace(device.first_read, timestamp=now))
    return device


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
        and all(map(_has_few_components, sample.devices))
    )


def _has_few_components(device: DeviceSample) -> bool:
    return max(len(device.components), len(device.component_peaks)) <= MAX_COMPONENTS


def _is_plausible(layout: Layout) -> bool:
    complete = len(layout.free_block_counts) == len(FREE_BLOCK_BOUNDS) + 1
    return complete and layout.largest_free_block_bytes <= layout.free_bytes


def _versions(directory: str, entries: Iterable[os.DirEntry[str]]) -> Iterator[_FileVersion]:
    for entry in entries:
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            yield _FileVersion.of(directory, entry.name, status)


def _read(directory: int, listed: _FileVersion) -> tuple[_FileVersion, bytes]:
    """Return the file's current version and content.

    Raises RejectedSampleError, or FileNotFoundError when the file is gone.
    """
    if not listed.regular:
        raise RejectedSampleError("not_regular")
    try:
        if not listed.directory:
            data, status = read_untrusted(
                listed.name, MAX_SAMPLE_BYTES, listed.uid, directory=directory
            )
        else:
            with open_untrusted_directory(listed.directory, listed.uid, directory=directory) as (
                own,
                _,
            ):
                data, status = read_untrusted(
                    listed.name, MAX_SAMPLE_BYTES, listed.uid, directory=own
                )
    except UntrustedFileError as error:
        raise RejectedSampleError(error.problem) from error
    return _FileVersion.of(listed.directory, listed.name, status), data
