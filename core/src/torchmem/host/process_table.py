"""The processes of this node as /proc shows them, seen from the reader's own pid namespace.

A process that is hidden from the reader is not the same as one that is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchmem.host.procfs import PROC, nested_pids, owner, pid_namespace, start_ticks
from torchmem.sample.sample import Process, Sample, State, live_state

# A process that /proc hides counts as alive for this long after its last write.
MAX_HIDDEN_SILENCE_SECONDS = 60.0
INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of Linux, include/linux/proc_ns.h

ProcessKey = tuple[int | None, int, int | None]
"""Pid namespace, pid in it and start ticks: unique on this node until it reboots."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What /proc shows of a process.

    `alive` is None when the process may be hidden. `pid` is its pid in the reader's namespace.
    `certain` is True when pid and start time both match, so that it is not a later process with
    the same pid.
    """

    alive: bool | None
    pid: int
    certain: bool = False


def process_key(process: Process) -> ProcessKey:
    """Return the three numbers that identify the process on this node."""
    return process.pid_namespace, process.pid, process.start_ticks


class ProcessTable:
    """Finds the process that wrote a sample.

    Processes in containers are found too if the reader sees the host's /proc. `hidden` replaces
    `is_hidden`.
    """

    def __init__(self, proc: Path = PROC, hidden: Callable[[int], bool] | None = None) -> None:
        self._proc = proc
        self._hidden = hidden or (lambda pid: is_hidden(pid, proc))
        self.namespace = pid_namespace("self", proc)
        self._host_pids: dict[ProcessKey, int | None] = {}
        self._nested: dict[tuple[int, int | None], list[int]] | None = None

    def locate(self, process: Process) -> ProcessStatus:
        """Return the current status of the process."""
        if process.pid_namespace in {None, self.namespace}:
            return self._status(process.pid, process)
        key = process_key(process)
        if key not in self._host_pids:
            self._host_pids[key] = self._find_in_containers(process)
        host_pid = self._host_pids[key]
        if host_pid is not None:
            return self._status(host_pid, process)
        return ProcessStatus(None if self._may_hide_processes() else False, process.pid)

    def owner(self, pid: int) -> int | None:
        """Return the numeric user ID of a visible process."""
        return owner(pid, self._proc)

    def forget_all_but(self, keys: set[ProcessKey]) -> None:
        """Drop what is cached about processes that no sample names anymore."""
        self._nested = None
        self._host_pids = {key: pid for key, pid in self._host_pids.items() if key in keys}

    def _status(self, pid: int, process: Process) -> ProcessStatus:
        ticks = start_ticks(pid, self._proc)
        if ticks is None:
            return ProcessStatus(None if self._hidden(pid) else False, pid)
        matches = ticks == process.start_ticks
        return ProcessStatus(matches or process.start_ticks is None, pid, certain=matches)

    def _find_in_containers(self, process: Process) -> int | None:
        """Return the host pid of the process, or None unless exactly one process matches.

        The innermost pid, the start time and, where it is readable, the namespace must agree.
        """
        if self._nested is None:
            self._nested = self._index_nested()
        namespaces = {None, process.pid_namespace}
        candidates = self._nested.get((process.pid, process.start_ticks), ())
        matching = [pid for pid in candidates if pid_namespace(pid, self._proc) in namespaces]
        return matching[0] if len(matching) == 1 else None

    def _index_nested(self) -> dict[tuple[int, int | None], list[int]]:
        """Return the host pids in inner pid namespaces by innermost pid and start ticks."""
        index: dict[tuple[int, int | None], list[int]] = {}
        for pid in (int(entry.name) for entry in self._proc.iterdir() if entry.name.isdecimal()):
            nested = nested_pids(pid, self._proc)
            ticks = start_ticks(pid, self._proc) if len(nested) > 1 else None
            if ticks is not None:
                index.setdefault((nested[-1], ticks), []).append(pid)
        return index

    def _may_hide_processes(self) -> bool:
        return self.namespace != INITIAL_PID_NAMESPACE or self._hidden(1)


def is_hidden(pid: int, proc: Path = PROC) -> bool:
    """Return whether a process exists that /proc hides from this user (mount option hidepid)."""
    try:
        (proc / str(pid) / "stat").read_bytes()
    except PermissionError:
        return True
    except OSError:
        return _refuses_signals(pid)
    return False


def _refuses_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def is_gone(pid: int, proc: Path = PROC) -> bool:
    """Return whether no thread with this pid is left, visible or hidden, that has not ended.

    A process that is torn down is still there; so is one whose first thread alone has ended. Of a
    zombie, all that is left is its exit code.
    """
    if start_ticks(pid, proc) is not None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    try:
        threads = list((proc / str(pid) / "task").iterdir())
    except OSError:
        return False
    return all(start_ticks(f"{pid}/task/{thread.name}", proc) is None for thread in threads)


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
