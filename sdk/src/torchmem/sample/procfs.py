"""What Linux tells about a process: start time, pid namespace, pids in nested namespaces."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def start_ticks(pid: int | str, proc: Path = PROC) -> int | None:
    """Field 22 of /proc/PID/stat, clock ticks since boot; None when the process is gone or hidden."""
    try:
        stat = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended already; it only waits for its parent to read the exit status.
    if len(fields) < 20 or fields[0] in {"Z", "X"}:
        return None
    return int(fields[19])


def pid_namespace(pid: int | str = "self", proc: Path = PROC) -> int | None:
    """Inode number of the pid namespace; None when it may not be seen."""
    try:
        return int((proc / str(pid) / "ns" / "pid").readlink().name.strip("pid:[]"))
    except (OSError, ValueError):
        return None


def owner(pid: int, proc: Path = PROC) -> int | None:
    """Effective user id of the process (`Uid` of /proc/PID/status); None when it is gone."""
    ids = _status(pid, "Uid:", proc)
    return ids[1] if len(ids) == 4 else None


def nested_pids(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """Pids of one process from the outermost visible namespace to its own (`NSpid` of /proc/PID/status)."""
    return _status(pid, "NSpid:", proc)


def _status(pid: int, key: str, proc: Path) -> tuple[int, ...]:
    try:
        lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return ()
    return next((tuple(map(int, line.split()[1:])) for line in lines if line.startswith(key)), ())


def own_start_ticks() -> int | None:
    """`start_ticks` of this process."""
    return start_ticks(os.getpid())
