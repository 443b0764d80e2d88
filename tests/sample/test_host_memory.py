"""Host memory of a process, from fake and real /proc and cgroup hierarchies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.host.host_memory import NO_LIMIT, MemoryGroup, host_memory, node_oom_kills
from torchmem.host.procfs import line_after

GIB = 1 << 30
PAGE = os.sysconf("SC_PAGE_SIZE")


def write(path: Path, text: str) -> None:
    """Write a file, and create the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Node:
    """A fake /proc with process 7, and a fake /sys/fs/cgroup of one version."""

    def __init__(self, folder: Path, version: int, group: str) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.root = self.cgroups / "memory" if version == 1 else self.cgroups
        self.version = version
        line = f"5:cpu,memory:{group}\n0::/\n" if version == 1 else f"0::{group}\n"
        for pid in ("7", "self"):
            write(self.proc / pid / "cgroup", line)
            write(self.proc / pid / "statm", "999 3 1 1 0 9 0\n")
        write(self.proc / "meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\n")
        write(self.proc / "vmstat", "oom_kill_other 9\noom_kill 2\n")
        self.root.mkdir(parents=True, exist_ok=True)

    def limit(self, path: str, limit: int | None, used: int = 0, inactive: int = 0) -> None:
        """Set the limit of a group, its usage, and the part of it that is inactive page cache."""
        folder = self.root / path.lstrip("/")
        unlimited = NO_LIMIT + NO_LIMIT - 4096 if self.version == 1 else "max"
        names = ("memory.max", "memory.current", "inactive_file", "memory.events")
        if self.version == 1:
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
                "memory.oom_control",
            )
        write(folder / names[0], f"{unlimited if limit is None else limit}\n")
        write(folder / names[1], f"{used}\n")
        write(folder / "memory.stat", f"inactive_file_other 1\n{names[2]} {inactive}\n")
        write(folder / names[3], "oom 5\noom_kill 3\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_that_leaves_the_least_counts(tmp_path: Path, version: int) -> None:
    """Of all limits above the process the tightest is reported; inactive page cache is free."""
    node = Node(tmp_path, version, "/jobs/7")
    node.limit("/jobs", 32 * GIB, used=20 * GIB, inactive=2 * GIB)
    node.limit("/jobs/7", 24 * GIB, used=8 * GIB, inactive=GIB)
    memory = host_memory(7, node.proc, node.cgroups)

    assert memory is not None
    assert (
        memory.rss_bytes,
        memory.limit_bytes,
        memory.available_bytes,
    ) == (3 * PAGE, 32 * GIB, 14 * GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_without_a_limit_the_machine_counts(tmp_path: Path, version: int) -> None:
    """Where no control group has a limit, the machine's memory is the limit."""
    node = Node(tmp_path, version, "/jobs")
    node.limit("/jobs", None, used=GIB)
    memory = host_memory(7, node.proc, node.cgroups)

    assert memory is not None
    assert (memory.limit_bytes, memory.available_bytes) == (64 * GIB, 40 * GIB)


@pytest.mark.parametrize("group", ["/../other", "/not/mounted/here"])
def test_a_group_that_is_not_visible_is_unknown(tmp_path: Path, group: str) -> None:
    """Another container's group gives neither a limit nor a count of OOM kills."""
    node = Node(tmp_path, 2, group)
    node.limit("/", GIB)
    memory = host_memory(7, node.proc, node.cgroups)

    assert memory is not None
    assert (memory.limit_bytes, memory.available_bytes) == (None, None)
    assert MemoryGroup.of(7, node.proc, node.cgroups) is None


def test_a_container_without_a_cgroup_namespace_sees_its_own_limit(tmp_path: Path) -> None:
    """The own group is the root of the mounted hierarchy, whatever path the process reads."""
    node = Node(tmp_path, 1, "/docker/4f")
    node.limit("/", 4 * GIB, used=GIB)
    memory = host_memory("self", node.proc, node.cgroups)

    assert memory is not None
    assert (memory.limit_bytes, memory.available_bytes) == (4 * GIB, 3 * GIB)


@pytest.mark.parametrize("version", [1, 2])
def test_oom_kills_are_counted(tmp_path: Path, version: int) -> None:
    """The kernel's counts of OOM kills are read for the group and for the machine."""
    node = Node(tmp_path, version, "/jobs")
    node.limit("/jobs", GIB)
    group = MemoryGroup.of(7, node.proc, node.cgroups)

    assert group is not None
    assert (group.oom_kills(), node_oom_kills(node.proc)) == (3, 2)


def test_a_process_that_has_ended_has_no_memory(tmp_path: Path) -> None:
    """A missing process and a zombie have no host memory."""
    node = Node(tmp_path, 2, "/")
    write(node.proc / "8" / "statm", "0 0 0 0 0 0 0\n")

    assert [host_memory(pid, node.proc, node.cgroups) for pid in (8, 9)] == [None, None]


@given(content=st.text(max_size=40))
def test_odd_files_are_unknown(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    """Whatever the kernel's files contain, values are plausible or absent, and nothing raises."""
    node = Node(tmp_path_factory.mktemp("node"), 2, "/jobs")
    node.limit("/jobs", GIB)
    for name in ("memory.max", "memory.current", "memory.stat", "memory.events"):
        write(node.root / "jobs" / name, content)
    write(node.proc / "7" / "cgroup", content)
    write(node.proc / "meminfo", content)
    memory = host_memory(7, node.proc, node.cgroups)

    assert memory is None or memory.limit_bytes is None or memory.available_bytes is not None


def test_this_process_has_a_limit() -> None:
    """On a real kernel the resident set is below the limit."""
    memory = host_memory()

    assert memory is not None
    assert memory.limit_bytes is not None
    assert 0 < memory.rss_bytes < memory.limit_bytes


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("Uid:\t1\t2\n", "\t1\t2"),
        ("Name:\tUid:\nUid:\t1", "\t1"),
        ("Name:\tx Uid:\nGroups:\t3\n", ""),
        ("", ""),
    ],
)
def test_a_line_of_a_kernel_file(text: str, rest: str) -> None:
    """A key is found only at the start of a line, wherever the line is."""
    assert line_after(text, "Uid:") == rest
