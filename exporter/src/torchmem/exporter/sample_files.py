"""The run directory as the exporter reads it: the newest valid sample of every process.

Any user may write to the run directory, so nothing in it is trusted. The exporter reads only files
that their owner alone could have put there: those in a directory to which only its owner may write,
and that belong to the same user. Links and special files are not opened, sizes and counts are
bounded for each user (`budgets`), and JSON is decoded strictly. Every file that is rejected is
counted by reason, and the first of each reason and user is logged.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from torchmem.exporter.budgets import (
    MAX_PAGE_BYTES_PER_FILE_BYTE,
    Budget,
    PageShare,
)
from torchmem.exporter.churn import Churn
from torchmem.exporter.directory_status import (
    OVERFLOW_UID,
    PROBLEM_TEXTS,
    DirectoryStatus,
    can_appear,
    directory_status,
)
from torchmem.exporter.plain_files import PlainFile, texts_hash
from torchmem.exporter.rejections import Reason, Refusals, RejectedSampleError
from torchmem.exporter.user_directories import FileVersion, list_files
from torchmem.host.process_table import ProcessKey, ProcessTable, process_key, process_state
from torchmem.node.published import Published
from torchmem.sample.launch import owned_launch
from torchmem.sample.run_directory import (
    DEFAULT_TTL_SECONDS,
    MAX_SAMPLE_BYTES,
)
from torchmem.sample.sample import (
    LIVE_STATES,
    SCHEMA_VERSION,
    DeviceSample,
    Sample,
    distinct_devices,
    is_consistent,
    possible,
)
from torchmem.sample.untrusted import (
    UntrustedFileError,
    lacks_descriptors,
    open_untrusted_directory,
    read_untrusted,
    sanitize_json,
)
from torchmem.sample.validity import FAULT_REASONS, Fault, FaultReason

_log = logging.getLogger(__name__)

V = TypeVar("V")

MAX_USERS = 256
MAX_TRIED_FILES = 8  # of a user, to find one that is worth a place among those users


@dataclass(frozen=True, slots=True)
class _File:
    """A decoded file. `seen`: when this version was first read.

    `texts` is a hash of all text in the file, and so of everything that becomes a label.
    """

    version: FileVersion
    sample: Sample
    seen: float
    texts: int

    @property
    def written(self) -> float:
        """When it was written, in Unix seconds; never later than it was first read."""
        return min(self.version.mtime, self.version.changed_ns / 1e9, self.seen)


_LIVE, _SHOWN, _NEW = range(3)
"""Users with a process that is known to be alive, others who have been exported, and the rest."""

_SAMPLES = msgspec.json.Decoder(Sample, strict=True)
# msgspec 0.22 examines a class at its first use, and a second thread that uses the class meanwhile
# ends the process with signal 11. So the class is used here first, where only one thread runs.

_Claimant = tuple[str, int | None]
"""User and pid namespace of a process."""
_Identity = tuple[int, str, str]
"""Labels rank, pid and run."""


class RunDirectory:
    """Reads the run directory at each scrape. A file that has not changed is not read again.

    The final values of a process that ended are kept until `ttl_seconds` after the process was
    last seen. The file itself is left to its owner, whose next process removes it. `all_series`:
    whether the page has all series of a sample, which then count.
    """

    def __init__(
        self,
        path: Path,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        processes: ProcessTable | None = None,
        churn: Churn | None = None,
        *,
        all_series: bool = False,
    ) -> None:
        self.path = path
        self.status = DirectoryStatus()
        self.lacks_descriptors = False
        """Whether ranks are missing because the last `read` had no file descriptor left."""
        self._ttl_seconds = ttl_seconds
        self._processes = processes or ProcessTable()
        self._files: dict[str, tuple[FileVersion, _File | None]] = {}
        self._last_seen: dict[tuple[str, ProcessKey], float] = {}
        self._users: dict[str, int] = {}
        self._holders: dict[_Identity, str] = {}
        self._refusals = Refusals()
        self._churn = churn or Churn()
        self._all_series = all_series
        self.faults = Counter[FaultReason](dict.fromkeys(FAULT_REASONS, 0))
        """Values that were left out because they are impossible, in all versions of all files."""

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
        try:
            published = self._read_all(now)
        except OSError as error:
            self.lacks_descriptors = lacks_descriptors(error)
            self._refusals.counts["no_descriptors"] += self.lacks_descriptors
            raise
        self.lacks_descriptors = self._refusals.lacked_descriptors
        return published

    def _read_all(self, now: float) -> list[Published]:
        with self._open() as directory:
            if directory is None:
                return []
            listed = list_files(directory, self._users, self._refusals)
            paths = {version.path for versions in listed.values() for version in versions}
            self._forget_all_but(paths)
            chosen = self._chosen(directory, listed, now)
            published = list(self._publish_all(directory, chosen, now))
        self._users = {file.version.user: _SHOWN for file, _ in published}
        self._users |= {file.version.user: _LIVE for file, item in published if item.attributed}
        known = (file.sample.process for _, file in self._files.values() if file)
        self._processes.forget_all_but(set(map(process_key, known)))
        self._refusals.end_scan(paths)
        self._churn.end_scan(now)
        return self._without_duplicates(published)

    @contextmanager
    def _open(self) -> Iterator[int | None]:
        """Yield a descriptor of the run directory, or None if it is missing; set `status`."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._set_status(DirectoryStatus(None if can_appear(self.path) else "missing"))
            self._forget_all_but(set())
            self._refusals.end_scan(())
            yield None
            return
        except OSError as error:
            if not lacks_descriptors(error):
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

    def _chosen(
        self, directory: int, listed: Mapping[str, list[FileVersion]], now: float
    ) -> Iterable[list[FileVersion]]:
        """Return the files of the users to export.

        If there are too many users, those with a process that is known to be alive come first, then
        those who have been exported so far, then those with the newest files. Users without a file
        that can be exported take no place.
        """
        if len(listed) <= MAX_USERS:
            return listed.values()
        node, ranks = Budget.of_node(), dict[str, tuple[bool, bool, int]]()
        for user in sorted(
            listed, key=lambda user: (user not in self._users, listed[user][0].size)
        ):
            best = self._best(directory, listed[user], node, now)
            if best is not None:
                ranks[user] = best.attributed, user in self._users, listed[user][0].changed_ns
        chosen = sorted(ranks, key=lambda user: ranks[user], reverse=True)
        for user in chosen[MAX_USERS:]:
            version = listed[user][0]
            self._refusals.exceed(version.path, version.uid, "too_many")
        for user in listed.keys() - chosen[:MAX_USERS]:
            self._forget(listed[user])
        return [listed[user] for user in chosen[:MAX_USERS]]

    def _best(
        self, directory: int, versions: Iterable[FileVersion], node: Budget, now: float
    ) -> Published | None:
        """Return one of a user's newest processes, if possible one that is known to be alive."""
        best: Published | None = None
        for version in islice(versions, MAX_TRIED_FILES):
            if not node.take("file_bytes", min(version.size, MAX_SAMPLE_BYTES)):
                self._refusals.exceed(version.path, version.uid, "over_budget")
                break
            file = self._load(directory, version, now)
            best = (self._publish(file, now) if file else None) or best
            if best and best.attributed:
                break
        return best

    def _forget(self, versions: Iterable[FileVersion]) -> None:
        """Forget decoded samples that are not exported; those that are refused stay known."""
        for version in versions:
            if self._files.get(version.path, (None, None))[1]:
                del self._files[version.path]

    def _publish_all(
        self, directory: int, listed: Iterable[list[FileVersion]], now: float
    ) -> Iterator[tuple[_File, Published]]:
        """Yield the processes within each user's budget; users who publish least come first.

        Before them come the users with processes that are known to be alive, and then those who
        have been exported so far. Those who come later have together the share of one of them.
        """
        node = Budget.of_node()
        groups = tuple[list[list[FileVersion]], ...]([] for _ in range(_NEW + 1))
        for versions in listed:
            groups[self._users.get(versions[0].user, _NEW)].append(versions)
        for number, group in enumerate(groups):
            later = any(groups[number + 1 :])
            for position, versions in enumerate(sorted(group, key=_total_bytes)):
                budget = node.share(len(group) - position + later)
                given = replace(budget)
                yield from self._publish_user(directory, versions, budget, now)
                node.take_all(budget, given)

    def _publish_user(
        self, directory: int, versions: Iterable[FileVersion], budget: Budget, now: float
    ) -> Iterator[tuple[_File, Published]]:
        """Yield the processes of one user, newest first, up to the first one beyond the budget.

        Files after that one are not read, so that no user's files take up the time of a scrape.
        """
        most_bytes = _total_bytes(versions) * MAX_PAGE_BYTES_PER_FILE_BYTE
        is_small = budget.take("page_bytes", most_bytes)
        reason: Reason | None = None
        for version in versions:
            reason = reason or self._refuse_unread(version, budget)
            file = None if reason else self._load(directory, version, now)
            item = self._publish(file, now) if file else None
            share = self._admit(file, item, now) if file and item else None
            if file and item and share is None:
                self._refusals.exceed(version.path, version.uid, "series_churn")
                continue
            if file and share is not None:
                reason = self._refuse_read(file.sample, share, budget, is_small=is_small)
            if reason and now - version.changed_ns / 1e9 <= self._ttl_seconds:
                self._refusals.exceed(version.path, version.uid, reason)
            elif file and item and not reason:
                yield file, item

    def _admit(self, file: _File, item: Published, now: float) -> PageShare | None:
        """Return what the process takes of the page, None if its user may not create its series."""
        process = item.sample.process
        numbers = process.pid_namespace, process.local_rank, process.world_size
        key = file.texts, process.rank, item.pid, *numbers
        read = partial(PageShare.of, item.sample, item.pid, all_series=self._all_series)
        user = file.version.user
        return self._churn.admit(user, key, read, now, is_live=item.attributed)

    @staticmethod
    def _refuse_unread(version: FileVersion, budget: Budget) -> Reason | None:
        """Take what reading the file costs, or return why it is not read."""
        if not budget.take("files", 1):
            return "too_many"
        is_within = budget.take("file_bytes", min(version.size, MAX_SAMPLE_BYTES))
        return None if is_within else "over_budget"

    @staticmethod
    def _refuse_read(
        sample: Sample, share: PageShare, budget: Budget, *, is_small: bool
    ) -> Reason | None:
        """Take what the process costs on the page, or return why it is not exported."""
        if not budget.take("devices", len(sample.devices)):
            return "too_many"
        is_within = budget.take("series", len(share.series)) and (
            is_small or budget.take("page_bytes", share.bytes)
        )
        return None if is_within else "over_budget"

    def _load(self, directory: int, listed: FileVersion, now: float) -> _File | None:
        version, file = self._files.get(listed.path, (None, None))
        if version != listed:
            try:
                version, file = self._decode(directory, listed, now)
            except OSError as error:
                self._leave_out(listed, error)
                return None
            self._files[listed.path] = version, file
        return file

    def _leave_out(self, version: FileVersion, error: OSError) -> None:
        """Note that no file descriptor was left for a file, which the next scan reads."""
        if not lacks_descriptors(error):
            raise error
        self._refusals.exceed(version.path, version.uid, "no_descriptors")

    def _decode(
        self, directory: int, listed: FileVersion, now: float
    ) -> tuple[FileVersion, _File | None]:
        version = listed
        try:
            version, data = _read(directory, listed)
            plain = PlainFile.of(data)
            sample, faults = decode_possible(data, plain)
            self.faults.update(fault.reason for fault in faults)
            sample = not_after(_owned(sample, version.uid), now)
            return version, _File(version, sample, now, texts_hash(data, plain))
        except RejectedSampleError as error:
            self._reject(version, error.reason)
        except FileNotFoundError:
            pass
        return version, None

    def _publish(self, file: _File, now: float) -> Published | None:
        """Return the process of one file, or None if it is rejected or its time to live is over."""
        process, version = file.sample.process, file.version
        try:
            status = self._processes.locate(process)
            owner = self._processes.owner(status.pid) if status.alive else None
        except OSError as error:
            self._leave_out(version, error)
            return None
        if owner not in {None, version.uid}:
            self._reject(version, "foreign_owner")
            return None
        silent_seconds = now - min(file.sample.timestamp, file.written)
        state = process_state(file.sample, status, now, silent_seconds)
        key = version.user, process_key(process)
        if state in LIVE_STATES:
            self._last_seen[key] = now
        elif now - max(file.written, self._last_seen.get(key, 0.0)) > self._ttl_seconds:
            self._files[version.path] = version, None
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

    def _reject(self, version: FileVersion, reason: Reason) -> None:
        """Count each version of a file once, not at every scrape."""
        self._refusals.once(version.path, version.uid, reason, version)

    def _forget_all_but(self, paths: set[str]) -> None:
        self._files = {path: entry for path, entry in self._files.items() if path in paths}
        known = {
            (file.version.user, process_key(file.sample.process))
            for _, file in self._files.values()
            if file is not None
        }
        self._last_seen = {key: seen for key, seen in self._last_seen.items() if key in known}


def _total_bytes(versions: Iterable[FileVersion]) -> int:
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


def _owned(sample: Sample, uid: int) -> Sample:
    """Return the sample in a launch of its file's owner, whatever the file says."""
    process = sample.process
    launch = owned_launch(process.launch, uid)
    if launch == process.launch:
        return sample
    return replace(sample, process=replace(process, launch=launch))


def not_after(sample: Sample, now: float) -> Sample:
    """Return the sample with no time later than `now`, in Unix seconds."""
    devices = tuple(_device_not_after(device, now) for device in sample.devices)
    is_same = all(map(operator.is_, devices, sample.devices))
    return _with(
        _clamped(sample, now, "timestamp"),
        process=_clamped(sample.process, now, "start_timestamp"),
        steps=_clamped(sample.steps, now, "last_timestamp", "progress_timestamp"),
        pinned=_clamped(sample.pinned, now, "timestamp"),
        devices=sample.devices if is_same else devices,
    )


def _device_not_after(device: DeviceSample, now: float) -> DeviceSample:
    return _with(
        _clamped(device, now, "component_peak_timestamp", "stats_timestamp"),
        layout=_clamped(device.layout, now, "timestamp"),
        last_oom=_clamped(device.last_oom, now, "timestamp"),
        first_read=_clamped(device.first_read, now, "timestamp"),
    )


def _with(value: V, **fields: object) -> V:
    """Return a dataclass with these fields; itself if it has them, because copies are costly."""
    changed = {name: new for name, new in fields.items() if getattr(value, name) is not new}
    return replace(value, **changed) if changed else value  # type: ignore[type-var]


def _clamped(value: V, now: float, *names: str) -> V:
    """Return a dataclass, or None, without times in these fields that are later than `now`."""
    late = {name: now for name in names if (getattr(value, name, None) or 0.0) > now}
    return replace(value, **late) if late else value  # type: ignore[type-var]


def decode(data: bytes) -> Sample:
    """Return the sample in a file; raise the errors of `decode_possible`."""
    return decode_possible(data)[0]


def decode_possible(data: bytes, file: PlainFile | None = None) -> tuple[Sample, tuple[Fault, ...]]:
    """Decode a sample file: strict types, bounded sizes and numbers, sanitized text.

    `file` is `PlainFile.of(data)` if the caller has it.

    Returns the sample without what cannot be true, and what was left out. Raises
    RejectedSampleError for anything else that a healthy SDK of this schema does not write.
    """
    try:
        file = file or PlainFile.of(data)
        plain = _decode_plain(data) if file and file.is_plain else None
        sample, faults = (plain, ()) if plain else possible(_decode_any(data))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RejectedSampleError("malformed") from error
    if sample is None:
        raise RejectedSampleError("out_of_bounds")
    devices = distinct_devices(sample.devices)
    if len(devices) < len(sample.devices):
        sample = replace(sample, devices=devices)
    return sample, faults


def _decode_plain(data: bytes) -> Sample | None:
    """Return the sample in a plain file; None if it is to be rejected or contradicts itself."""
    try:
        sample = _SAMPLES.decode(data)
    except msgspec.MsgspecError:
        return None
    is_usual = sample.schema == SCHEMA_VERSION and is_consistent(sample)
    return sample if is_usual else None


def _decode_any(data: bytes) -> Sample:
    raw = msgspec.json.decode(data)
    if isinstance(raw, dict) and raw.get("schema") != SCHEMA_VERSION:
        raise RejectedSampleError("unknown_schema")
    return msgspec.convert(_sanitized(raw), Sample, strict=True)


def _sanitized(raw: Any) -> Any:
    try:
        return sanitize_json(raw, keeps_numbers=True)
    except ValueError as error:
        raise RejectedSampleError("out_of_bounds") from error


def _read(directory: int, listed: FileVersion) -> tuple[FileVersion, bytes]:
    """Return the file's current version and content.

    Raises RejectedSampleError, FileNotFoundError when the file is gone, and OSError when no file
    descriptor is left.
    """
    if not listed.regular:
        raise RejectedSampleError("not_regular")
    try:
        with open_untrusted_directory(listed.directory, listed.uid, directory=directory) as (
            own,
            _,
        ):
            data, status = read_untrusted(listed.name, MAX_SAMPLE_BYTES, listed.uid, directory=own)
    except UntrustedFileError as error:
        if error.problem == "no_descriptors":
            raise OSError(errno.EMFILE, str(error)) from error
        raise RejectedSampleError(error.problem) from error
    return FileVersion.of(listed.directory, listed.name, status), data
