"""The instrumented processes of a run directory, for commands that address one of them.

Users find only their own processes, so files of other users have no effect; root finds the
processes of all users. The content of the files is not trusted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from torchmem.host.process_table import ProcessTable
from torchmem.host.procfs import start_ticks
from torchmem.output.terminal import first_of
from torchmem.sample.errors import UsageError
from torchmem.sample.launch import is_launch, owned_launch
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES, SAMPLE_SUFFIX, find_files
from torchmem.sample.sample import Process
from torchmem.sample.untrusted import UntrustedFileError, convert, read_untrusted, sanitize_json

MAX_NAMED = 8
T = TypeVar("T")
Launched = Callable[[T], tuple[str | None, float | None]]
START = "start a process with `torchmem run -- COMMAND`, or name another directory with --run-dir."


@dataclass(frozen=True, slots=True)
class TrainingProcess:
    """A process that has published a sample.

    `sample`: its file, owned by the user `uid`. `pid`: its process id in this namespace. `alive`:
    whether it still runs; None if /proc may hide it from this user. `written_ns`: when the sample
    was written, in Unix nanoseconds.
    """

    sample: Path
    uid: int
    process: Process
    pid: int
    alive: bool | None
    written_ns: int = 0

    def __str__(self) -> str:
        return f"rank {self.process.rank} of run {self.process.run} (pid {self.pid})"

    def launched(self) -> tuple[str | None, float | None]:
        """Return the launch, and the start in Unix seconds."""
        return self.process.launch, self.process.start_timestamp

    def has_ended(self) -> bool:
        """Return whether the process was alive when it was found and has ended since."""
        return self.alive is True and start_ticks(self.pid) != self.process.start_ticks


@dataclass(frozen=True, slots=True)
class ProcessFilter:
    """The processes to select; None matches any value.

    `pid` is the process id in this namespace or in the namespace of the process. Of a run of
    which several launches are there, `newest` selects those of the one that started last.
    """

    rank: int | None = None
    run: str | None = None
    pid: int | None = None
    launch: str | None = None

    def matches(self, candidate: TrainingProcess) -> bool:
        """Return whether the process has the rank, run, launch and pid of this filter."""
        return self.selects(candidate.process, candidate.pid)

    def selects(self, process: Process, pid: int | None = None) -> bool:
        """Return whether the process has all of these; `pid` is the one seen here."""
        return (
            self.rank in {None, process.rank}
            and self.run in {None, process.run}
            and self.launch in {None, process.launch}
            and (self.pid is None or self.pid in {pid, process.pid})
        )

    def newest(self, found: Sequence[T], launched: Launched[T]) -> list[T]:
        """Return those of the newest launch if only its run is named, else all that were found.

        `launched` returns the launch and the start of one, in Unix seconds. A launch is as new as
        its newest rank.
        """
        if self.run is None or self.launch is not None or self.pid is not None or not found:
            return list(found)
        newest, _ = max(map(launched, found), key=lambda known: known[1] or 0.0)
        return [item for item in found if launched(item)[0] == newest]


def find_process(
    directory: Path, selected: ProcessFilter, *, or_ended: bool = False
) -> TrainingProcess:
    """Return the only running process that the filter matches.

    With `or_ended`, the newest that has ended and left its sample, if none is running. Raise
    UsageError if no process matches, if several do, or if it has ended.
    """
    processes = sorted(
        training_processes(directory), key=lambda p: (p.process.run, p.process.rank, p.pid)
    )
    matching = [process for process in processes if selected.matches(process)]
    alive = [process for process in matching if process.alive is not False]
    running = selected.newest(alive, TrainingProcess.launched)
    if len(running) == 1:
        return running[0]
    if running:
        raise UsageError(
            f"several processes match: {first_of(running, MAX_NAMED)}; select one with --rank, "
            "--run, --launch or --pid."
        )
    if matching and or_ended:
        return max(matching, key=lambda item: item.written_ns)
    if matching:
        raise UsageError(f"{matching[0]} has ended; select a running process.")
    others = first_of([process for process in processes if process.alive is not False], MAX_NAMED)
    hint = " Only root can select processes of other users." if os.geteuid() else ""
    if others:
        raise UsageError(f"no process in {directory} matches; running processes: {others}.{hint}")
    raise UsageError(f"no process of yours runs in {directory}: {START}{hint}")


def training_processes(directory: Path) -> Iterator[TrainingProcess]:
    """Yield this user's processes. Raise UsageError if the directory cannot be read.

    A sample is skipped if it is malformed, or not owned by the user of its process.
    """
    processes = ProcessTable()
    try:
        files = find_files(
            directory, lambda name: name.endswith(SAMPLE_SUFFIX), os.geteuid() or None
        )
    except FileNotFoundError:
        raise UsageError(f"the run directory {directory} does not exist: {START}") from None
    except OSError as error:
        raise UsageError(
            f"the run directory {directory} cannot be read ({error.strerror}): name another one "
            "with --run-dir."
        ) from None
    for path, status in files:
        process = _read(path, status, processes)
        if process is not None:
            yield process


def _read(path: Path, status: os.stat_result, processes: ProcessTable) -> TrainingProcess | None:
    uid = status.st_uid
    try:
        data = read_untrusted(path, MAX_SAMPLE_BYTES, uid)[0]
        sample = json.loads(data)
        process = convert(sanitize_json(sample["process"]), Process)
        launch = process.launch if is_launch(process.launch) else None
        process = replace(process, launch=owned_launch(launch, uid))
        ended = sample.get("ended") is not None
    except (UntrustedFileError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    location = processes.locate(process)
    # Anyone can write a sample that names the pid of another user's process.
    if location.alive and processes.owner(location.pid) not in {None, uid}:
        return None
    alive = False if ended else location.alive
    return TrainingProcess(path, uid, process, location.pid, alive, status.st_mtime_ns)
