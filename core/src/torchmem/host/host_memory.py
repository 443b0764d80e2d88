"""Host memory of a process: resident set, memory limit, and OOM kills, from /proc and cgroups."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torchmem.host.procfs import PROC, line_after, read_file
from torchmem.sample.sample import HostMemory

CGROUPS = Path("/sys/fs/cgroup")
# Version 1 writes "no limit" as the largest number of whole pages in a signed 64-bit integer.
NO_LIMIT = 1 << 62
_KIB = 1024


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit, and what is left below it, in bytes."""

    limit: int
    available: int


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group that accounts for memory: its folder, the hierarchy's folder, the version."""

    folder: Path
    root: Path
    version: int

    @classmethod
    def of(
        cls, pid: int | str = "self", proc: Path = PROC, cgroups: Path = CGROUPS
    ) -> MemoryGroup | None:
        """Return the group of a process, or None if it is not visible here.

        In a container without a cgroup namespace, a process reads its path on the host but sees its
        own group as the root of the hierarchy. `pid="self"` therefore falls back to the root.
        """
        found = _path(_read(f"{proc}/{pid}/cgroup"))
        if found is None:
            return None
        path, version = found
        root = cgroups / "memory" if version == 1 else _unified(cgroups)
        folder = root / path.lstrip("/")
        if ".." not in PurePosixPath(path).parts and folder.is_dir():
            return cls(folder, root, version)
        return cls(root, root, version) if pid == "self" and root.is_dir() else None

    def oom_kills(self) -> int | None:
        """Return how many processes of the group the kernel's OOM killer has ended."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return _field(_read(f"{self.folder}/{name}"), "oom_kill")

    def limits(self) -> Iterator[MemoryLimit]:
        """Yield the limit of the group and of every group above it that has one."""
        folder = self.folder
        while True:
            limit = self._limit(folder)
            if limit is not None:
                yield limit
            if folder == self.root:
                return
            folder = folder.parent

    def _limit(self, folder: Path) -> MemoryLimit | None:
        """Return what is left below the limit once the inactive page cache is reclaimed."""
        names = ("memory.max", "memory.current", "inactive_file")
        if self.version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit = _number(_read(f"{folder}/{names[0]}"))
        if limit is None or limit >= NO_LIMIT:
            return None
        used = _number(_read(f"{folder}/{names[1]}"))
        if used is None:
            return None
        reclaimable = _field(_read(f"{folder}/memory.stat"), names[2]) or 0
        return MemoryLimit(limit, max(0, limit - max(0, used - reclaimable)))


def host_memory(
    pid: int | str = "self", proc: Path = PROC, cgroups: Path = CGROUPS
) -> HostMemory | None:
    """Return the host memory of a process; None when it has ended.

    The limit is unknown when the control group of the process is not visible.
    """
    group = MemoryGroup.of(pid, proc, cgroups)
    return memory_within(pid, [*group.limits(), *machine_limits(proc)] if group else [], proc)


def memory_within(
    pid: int | str, limits: Sequence[MemoryLimit], proc: Path = PROC
) -> HostMemory | None:
    """Return the host memory of a process with these limits; None when it has ended."""
    resident = _resident_bytes(pid, proc)
    if resident is None:
        return None
    tightest = min(limits, key=lambda limit: limit.available, default=None)
    return HostMemory(
        rss_bytes=resident,
        limit_bytes=tightest.limit if tightest else None,
        available_bytes=tightest.available if tightest else None,
    )


def node_oom_kills(proc: Path = PROC) -> int | None:
    """Return how many processes the kernel's OOM killer has ended on this machine, by any limit.

    Source: `oom_kill` of /proc/vmstat, since Linux 4.13; the same in all containers.
    """
    return _field(_read(f"{proc}/vmstat"), "oom_kill")


def _resident_bytes(pid: int | str, proc: Path) -> int | None:
    """Return the second field of /proc/PID/statm in bytes; it is 0 for a zombie."""
    fields = _read(f"{proc}/{pid}/statm").split()
    pages = int(fields[1]) if len(fields) > 1 else 0
    return pages * os.sysconf("SC_PAGE_SIZE") or None


def machine_limits(proc: Path = PROC) -> Iterator[MemoryLimit]:
    """Yield the memory of the machine as a limit."""
    text = _read(f"{proc}/meminfo")
    total, available = _field(text, "MemTotal:"), _field(text, "MemAvailable:")
    if total is not None and available is not None:
        yield MemoryLimit(total * _KIB, available * _KIB)


def _path(text: str) -> tuple[str, int] | None:
    """Return the path of the memory controller in /proc/PID/cgroup, and the cgroup version."""
    unified = None
    for line in text.splitlines():
        if line.count(":") < 2:
            continue
        controllers, _, path = line.partition(":")[2].partition(":")
        if "memory" in controllers.split(","):
            return path, 1
        if not controllers:
            unified = path, 2
    return unified


def _unified(cgroups: Path) -> Path:
    """Return the hierarchy of version 2, which a hybrid system mounts beside version 1."""
    hybrid = cgroups / "unified"
    return hybrid if hybrid.is_dir() else cgroups


def _read(path: str) -> str:
    """Return a file of the kernel; empty when it cannot be read, or its process has ended."""
    try:
        return read_file(path) or ""
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _field(text: str, name: str) -> int | None:
    """Return the number behind a name at the start of a line."""
    words = line_after(text, f"{name} ").split()
    return int(words[0]) if words else None
