"""The run directory as it is shown: every process's newest sample with its state; what is refused is counted."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmem.exporter import files
from torchmem.exporter.decode import decode
from torchmem.exporter.files import FileVersion
from torchmem.exporter.liveness import state
from torchmem.exporter.refusals import REASONS, Reason, RefusedError
from torchmem.sample.processes import Identity, Processes, identity
from torchmem.sample.sample import LIVE_STATES, Sample, State

MAX_FILES_PER_USER = 1024
MAX_DEVICES_PER_USER = 2048
DEFAULT_TTL_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Published:
    """One process to show. `pid` counts where the exporter counts.

    `attributed`: the process with that pid is known to be the one that wrote the sample.
    """

    sample: Sample
    pid: int
    state: State
    attributed: bool


@dataclass(frozen=True, slots=True)
class _File:
    version: FileVersion
    sample: Sample


class RunDirectory:
    """Reads the run directory at each scrape; a file that did not change is not read again.

    The final values of a process that ended are kept for `ttl_seconds` after it was last seen, then its file goes.
    """

    def __init__(
        self,
        path: Path,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        processes: Processes | None = None,
    ) -> None:
        self.path = path
        self._ttl_seconds = ttl_seconds
        self._processes = processes or Processes()
        self._decoded: dict[str, tuple[FileVersion, Sample | None]] = {}
        self._refused: dict[str, FileVersion] = {}
        self._last_seen: dict[Identity, float] = {}
        self._rejections: dict[Reason, int] = dict.fromkeys(REASONS, 0)

    @property
    def namespace(self) -> int | None:
        """The pid namespace in which the pids of `read` count."""
        return self._processes.namespace

    @property
    def rejections(self) -> Mapping[Reason, int]:
        """Refused file versions by reason since the exporter started."""
        return self._rejections

    def read(self, now: float) -> list[Published]:
        """Everything to show at `now` (Unix seconds); raises OSError when the directory cannot be read."""
        with files.open_directory(self.path) as directory:
            if directory is None:
                return []
            versions = files.scan(directory)
            self._forget_all_but({version.name for version in versions})
            found = list(self._load_all(directory, versions))
            shown = [
                item for file in found if (item := self._judge(directory, file, now)) is not None
            ]
        self._processes.forget_all_but({identity(file.sample.process) for file in found})
        return self._without_duplicates(shown)

    def _load_all(self, directory: int, versions: Iterable[FileVersion]) -> Iterable[_File]:
        """The valid samples within each user's share, newest first."""
        files_of, devices_of = Counter[int](), Counter[int]()
        for version in versions:
            files_of[version.uid] += 1
            if files_of[version.uid] > MAX_FILES_PER_USER:
                self._refuse(version, "too_many")
                continue
            file = self._load(directory, version)
            if file is None:
                continue
            devices_of[file.version.uid] += len(file.sample.devices)
            if devices_of[file.version.uid] > MAX_DEVICES_PER_USER:
                self._refuse(file.version, "too_many")
                continue
            yield file

    def _load(self, directory: int, listed: FileVersion) -> _File | None:
        known, sample = self._decoded.get(listed.name, (None, None))
        if known != listed:
            known, sample = self._decode(directory, listed)
            self._decoded[listed.name] = known, sample
        return None if sample is None or known is None else _File(known, sample)

    def _decode(self, directory: int, listed: FileVersion) -> tuple[FileVersion, Sample | None]:
        version = listed
        try:
            version, data = files.read(directory, listed)
            return version, decode(data)
        except RefusedError as refused:
            self._refuse(version, refused.reason)
        except FileNotFoundError:
            pass
        return version, None

    def _judge(
        self, directory: int, file: _File, now: float
    ) -> tuple[FileVersion, Published] | None:
        process = file.sample.process
        sighting = self._processes.locate(process)
        if sighting.alive and self._processes.owner(sighting.pid) not in {None, file.version.uid}:
            self._refuse(file.version, "foreign_owner")
            return None
        written = min(file.sample.timestamp, file.version.mtime)
        verdict = state(file.sample, sighting, now, now - written)
        if verdict in LIVE_STATES:
            self._last_seen[identity(process)] = now
        elif (
            now - max(file.version.mtime, self._last_seen.get(identity(process), 0.0))
            > self._ttl_seconds
        ):
            with contextlib.suppress(OSError):
                os.unlink(file.version.name, dir_fd=directory)
            return None
        return file.version, Published(
            file.sample, sighting.pid, verdict, bool(sighting.alive) and sighting.certain
        )

    def _without_duplicates(self, shown: list[tuple[FileVersion, Published]]) -> list[Published]:
        """One process for each (rank, pid, run), a living one first: two would be the same series twice."""
        chosen: dict[tuple[int, int, str], Published] = {}
        for version, item in sorted(
            shown, key=lambda pair: (not pair[1].attributed, -pair[1].sample.timestamp)
        ):
            process = item.sample.process
            key = (process.rank, item.pid, process.run)
            if key in chosen:
                self._refuse(version, "duplicate")
            chosen.setdefault(key, item)
        return list(chosen.values())

    def _refuse(self, version: FileVersion, reason: Reason) -> None:
        """Count each version of a file once, not at every scrape."""
        if self._refused.get(version.name) != version:
            self._refused[version.name] = version
            self._rejections[reason] += 1

    def _forget_all_but(self, names: set[str]) -> None:
        self._decoded = {name: entry for name, entry in self._decoded.items() if name in names}
        self._refused = {name: version for name, version in self._refused.items() if name in names}
        kept = {
            identity(sample.process) for _, sample in self._decoded.values() if sample is not None
        }
        self._last_seen = {key: seen for key, seen in self._last_seen.items() if key in kept}
