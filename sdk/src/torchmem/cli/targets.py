"""The training processes of a run directory, for commands that talk to one of them; the files are not trusted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmem.core import proc
from torchmem.core.errors import UsageError
from torchmem.core.files import UntrustedFileError, read_untrusted
from torchmem.core.rundir import MAX_SAMPLE_BYTES, SAMPLE_SUFFIX
from torchmem.core.sample import Process
from torchmem.core.untrusted import harmless
from torchmem.exporter.processes import Processes

MOST_FILES = 16384
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Target:
    """One process that published a sample: its file, the file's owner, its pid here, and whether it still runs.

    `alive` is None where it may be hidden from this user.
    """

    sample: Path
    uid: int
    process: Process
    pid: int
    alive: bool | None

    def __str__(self) -> str:
        return f"rank {self.process.rank} of run {self.process.run} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which process: None takes any. `pid` as this namespace counts, or as the process itself does."""

    rank: int | None = None
    run: str | None = None
    pid: int | None = None

    def fits(self, target: Target) -> bool:
        """Whether this is a process that was asked for."""
        process = target.process
        return (
            self.rank in {None, process.rank}
            and self.run in {None, process.run}
            and self.pid in {None, target.pid, process.pid}
        )


def find(directory: Path, wanted: Wanted) -> Target:
    """The one living process that is wanted.

    Raises UsageError when there is none, when it is gone, or when there are several.
    """
    everyone = sorted(targets(directory), key=lambda target: (target.process.run, target.process.rank, target.pid))
    fitting = [target for target in everyone if wanted.fits(target)]
    living = [target for target in fitting if target.alive is not False]
    if len(living) == 1:
        return living[0]
    if living:
        raise UsageError(f"several processes match: {_names(living)}; narrow it with --rank, --run or --pid.")
    if fitting:
        raise UsageError(f"{fitting[0]} is gone; a process can only be captured while it runs.")
    there = _names([target for target in everyone if target.alive is not False])
    raise UsageError(f"no process in {directory} matches; there {f'are: {there}' if there else 'is none'}.")


def _names(found: list[Target]) -> str:
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(str(target) for target in found[:MOST_NAMED]) + more


def targets(directory: Path) -> Iterator[Target]:
    """All processes of the directory; a sample that its process's user does not own is left out."""
    processes = Processes()
    try:
        paths = [path for path in directory.iterdir() if path.name.endswith(SAMPLE_SUFFIX)][:MOST_FILES]
    except OSError as error:
        raise UsageError(f"the run directory {directory} cannot be read ({error.strerror}); see --run-dir.") from None
    for path in paths:
        target = _target(path, processes)
        if target is not None:
            yield target


def _target(path: Path, processes: Processes) -> Target | None:
    try:
        data, status = read_untrusted(path, MAX_SAMPLE_BYTES)
        sample = json.loads(data)
        process = _process(sample["process"])
    except (UntrustedFileError, OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sighting = processes.locate(process)
    if sighting.alive and processes.owner(sighting.pid) not in {None, status.st_uid}:
        return None
    ended = sample.get("ended") is not None
    return Target(path, status.st_uid, process, sighting.pid, False if ended else sighting.alive)


def _process(fields: dict[str, Any]) -> Process:
    """What names the process; raises ValueError, KeyError or TypeError for what the SDK does not write."""
    return Process(
        pid=_number(fields["pid"]),
        pid_namespace=None if fields["pid_namespace"] is None else _number(fields["pid_namespace"]),
        start_ticks=None if fields["start_ticks"] is None else _number(fields["start_ticks"]),
        hostname="",
        run=harmless(fields["run"]),
        rank=_number(fields["rank"]),
    )


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("not a number of a process")
    return value


def is_gone(target: Target) -> bool:
    """Whether the process has certainly ended by now."""
    ticks = proc.start_ticks(target.pid)
    return target.alive is True and ticks != target.process.start_ticks
