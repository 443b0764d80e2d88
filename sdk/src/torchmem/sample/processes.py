"""Which process a sample comes from, seen from the reader's own pid namespace; hidden is not the same as gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchmem.sample.procfs import PROC, nested_pids, owner, pid_namespace, start_ticks
from torchmem.sample.sample import Process

INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of Linux, include/linux/proc_ns.h

Identity = tuple[int | None, int, int | None]
"""Pid namespace, pid in it and start ticks: one process for ever."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What can be seen of a process: `alive` None when it may be hidden; `pid` as the exporter counts.

    `certain`: pid and start time both match, so that this is the process and no later one with the same pid.
    """

    alive: bool | None
    pid: int
    certain: bool = False


def identity(process: Process) -> Identity:
    """The three numbers that name the process on this node."""
    return process.pid_namespace, process.pid, process.start_ticks


def is_hidden(pid: int, proc: Path = PROC) -> bool:
    """Whether a process exists that /proc does not show to this user (mount option hidepid)."""
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


class Processes:
    """Finds the processes behind samples, also those of containers when the exporter sees the host's /proc."""

    def __init__(self, proc: Path = PROC, hidden: Callable[[int], bool] | None = None) -> None:
        self._proc = proc
        self._hidden = hidden or (lambda pid: is_hidden(pid, proc))
        self.namespace = pid_namespace("self", proc)
        self._host_pids: dict[Identity, int | None] = {}
        self._nested: dict[tuple[int, int | None], list[int]] | None = None

    def locate(self, process: Process) -> Sighting:
        """Look for the process now."""
        if process.pid_namespace in {None, self.namespace}:
            return self._look(process.pid, process)
        key = identity(process)
        if key not in self._host_pids:
            self._host_pids[key] = self._find_in_containers(process)
        host_pid = self._host_pids[key]
        if host_pid is not None:
            return self._look(host_pid, process)
        return Sighting(None if self._may_hide_others() else False, process.pid)

    def owner(self, pid: int) -> int | None:
        """Numeric user id of a visible process."""
        return owner(pid, self._proc)

    def forget_all_but(self, keep: set[Identity]) -> None:
        """End a round: drop what was remembered of processes that no sample names any more."""
        self._nested = None
        self._host_pids = {key: pid for key, pid in self._host_pids.items() if key in keep}

    def _look(self, pid: int, process: Process) -> Sighting:
        ticks = start_ticks(pid, self._proc)
        if ticks is None:
            return Sighting(None if self._hidden(pid) else False, pid)
        matches = ticks == process.start_ticks
        return Sighting(matches or process.start_ticks is None, pid, certain=matches)

    def _find_in_containers(self, process: Process) -> int | None:
        """The one visible process whose innermost pid, start time and, where readable, namespace all agree."""
        if self._nested is None:
            self._nested = self._index_nested()
        namespaces = {None, process.pid_namespace}
        candidates = self._nested.get((process.pid, process.start_ticks), ())
        found = [pid for pid in candidates if pid_namespace(pid, self._proc) in namespaces]
        return found[0] if len(found) == 1 else None

    def _index_nested(self) -> dict[tuple[int, int | None], list[int]]:
        """Host pids of all processes in inner pid namespaces, by innermost pid and start ticks."""
        index: dict[tuple[int, int | None], list[int]] = {}
        for pid in (int(entry.name) for entry in self._proc.iterdir() if entry.name.isdecimal()):
            nested = nested_pids(pid, self._proc)
            ticks = start_ticks(pid, self._proc) if len(nested) > 1 else None
            if ticks is not None:
                index.setdefault((nested[-1], ticks), []).append(pid)
        return index

    def _may_hide_others(self) -> bool:
        return self.namespace != INITIAL_PID_NAMESPACE or self._hidden(1)
