"""Facts about processes from Linux's /proc: start time, owner, pid namespace and nested pids."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchmem.sample.untrusted import lacks_descriptors

PROC = Path("/proc")
_READ_BYTES = 1 << 16


def read_file(path: Path | str) -> str | None:
    """Return a file of the kernel; None if it is missing, hidden, or its process has ended.

    Raises OSError if no file descriptor is left, which does not mean that the process has ended.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:  # without a file object, which costs as much as the reading
            content = os.read(descriptor, _READ_BYTES)
            while part := os.read(descriptor, _READ_BYTES):
                content += part
        finally:
            os.close(descriptor)
    except OSError as error:
        if lacks_descriptors(error):
            raise
        return None
    return content.decode(errors="replace")


def start_ticks(pid: int | str, proc: Path = PROC) -> int | None:
    """Return field 22 of /proc/PID/stat, in clock ticks since boot.

    Return None when the process has ended, zombies included, or cannot be seen.
    """
    stat = read_file(f"{proc}/{pid}/stat")
    if stat is None:
        return None
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in {"Z", "X"}:
        return None
    return int(fields[19])


def start_time(ticks: int, now: float) -> float:
    """Return `start_ticks` in Unix seconds, given the current time; off by a tick at most."""
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return now - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def own_start_ticks() -> int | None:
    """Return `start_ticks` of this process; None also if no file descriptor is left."""
    try:
        return start_ticks(os.getpid())
    except OSError:
        return None


def pid_namespace(pid: int | str = "self", proc: Path = PROC) -> int | None:
    """Return the inode number of the pid namespace; None when it cannot be read."""
    try:
        return int((proc / str(pid) / "ns" / "pid").readlink().name.strip("pid:[]"))
    except (OSError, ValueError):
        return None


def owner(pid: int, proc: Path = PROC) -> int | None:
    """Return the effective user ID (`Uid` of /proc/PID/status); None when the process has ended."""
    ids = _status(pid, "Uid:", proc)
    return ids[1] if len(ids) == 4 else None


def nested_pids(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """Return the pids of the process from the outermost visible namespace to its own.

    Source: `NSpid` of /proc/PID/status. Empty when the process has ended.
    """
    return _status(pid, "NSpid:", proc)


def _status(pid: int, key: str, proc: Path) -> tuple[int, ...]:
    text = read_file(f"{proc}/{pid}/status") or ""
    return tuple(map(int, line_after(text, key).split()))


def line_after(text: str, key: str) -> str:
    """Return the rest of the first line that starts with a key; empty if there is none."""
    start = 0 if text.startswith(key) else text.find(f"\n{key}") + 1
    if start == 0 and not text.startswith(key):
        return ""
    end = text.find("\n", start)
    return text[start + len(key) : None if end < 0 else end]
