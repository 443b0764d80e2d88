"""Host memory of ranks in the exporter, and what killed them, on the real kernel and a fake one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.exposition import Exposition, scrape
from support.publishing import own_process, own_sample, publish
from support.waiting import until

from torchmem.exporter.collect import Exporter
from torchmem.host.host_memory import MemoryGroup
from torchmem.host.procfs import start_ticks
from torchmem.node.host_processes import HostProcesses
from torchmem.node.published import Published
from torchmem.sample.sample import HostMemory, Process, State

OpenExporter = Callable[..., Exporter]
LIMIT = 64 << 20
# Allocates more than LIMIT when a line arrives.
GREEDY = "import sys; sys.stdin.readline(); x = bytearray(512 << 20)"


@contextmanager
def child(
    code: str, *, group: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], Process]]:
    """Start a process, in a control group if one is given; yield it with its identity."""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True) as popen:
        try:
            if group:
                (group / "cgroup.procs").write_text(str(popen.pid))
            ticks = until(lambda: start_ticks(popen.pid))
            yield popen, own_process(pid=popen.pid, start_ticks=ticks)
        finally:
            popen.kill()


@contextmanager
def limited_group() -> Iterator[Path]:
    """Create a control group with a memory limit below the test's own; skip where that fails."""
    own = MemoryGroup.of()
    if own is None or os.geteuid() != 0:
        pytest.skip("only root can create a control group with a memory limit")
    folder = own.folder / f"torchmem-test-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be created here: {error}")
    try:
        name = "memory.limit_in_bytes" if own.version == 1 else "memory.max"
        if not (folder / name).exists():
            pytest.skip("the memory controller is not delegated to new control groups here")
        (folder / name).write_text(str(LIMIT))
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def cause(page: Exposition) -> dict[str, float]:
    """Return the value of each cause of death."""
    return page.by("cause", "torchmem_process_kill_cause")


def test_a_process_over_its_memory_limit_was_killed_for_host_memory(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """If the kernel's OOM killer ends a rank, the page says so, and shows its limit before."""
    exporter = open_exporter()
    with limited_group() as group, child(GREEDY, group=group) as (popen, process):
        publish(run_dir, own_sample(process=process, host=None))
        before = scrape(exporter)
        popen.communicate("go\n")

        assert before.value("torchmem_host_limit_bytes") == LIMIT
        assert 0 < (before.value("torchmem_host_available_bytes") or 0) <= LIMIT
        assert popen.returncode == -signal.SIGKILL
        assert cause(scrape(exporter)) == {"host_memory": 1, "signal": 0}
    assert cause(scrape(exporter)) == {"host_memory": 1, "signal": 0}


def test_a_killed_process_was_killed_by_a_signal(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """If a rank is killed and no OOM kill was counted, the cause is a signal."""
    exporter = open_exporter()
    with child("input()") as (popen, process):
        publish(run_dir, own_sample(process=process))
        assert not cause(scrape(exporter))
        popen.kill()
        popen.wait()
    assert cause(scrape(exporter)) == {"host_memory": 0, "signal": 1}


def test_a_death_before_the_first_scrape_has_no_cause(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """An exporter that never saw the process alive does not know what killed it."""
    with child("input()") as (popen, process):
        publish(run_dir, own_sample(process=process))
        popen.kill()
        popen.wait()
    page = scrape(open_exporter())

    assert page.value("torchmem_process_state", state="killed") == 1
    assert not cause(page)


def test_the_exporter_reads_newer_host_memory(open_exporter: OpenExporter, run_dir: Path) -> None:
    """The resident set is that of the process now, not the one in its sample."""
    with child("input()") as (_, process):
        publish(run_dir, own_sample(process=process, host=HostMemory(1, 2, 1)))
        resident = scrape(open_exporter()).value("torchmem_host_rss_bytes")
        assert resident is not None
        assert resident > 1 << 20


def published(state: State, pid: int = 7) -> Published:
    """Return rank 0 with process id `pid`."""
    process = own_process(pid=pid, start_ticks=1)
    sample = own_sample(process=process, host=HostMemory(5, 64, 20))
    return Published(sample, pid, state, attributed=state == "running")


@pytest.mark.parametrize(
    ("kills_on_node", "expected"), [(2, {"host_memory": 0, "signal": 1}), (3, {})]
)
def test_a_kill_elsewhere_on_the_node_proves_nothing(
    tmp_path: Path, kills_on_node: int, expected: dict[str, float]
) -> None:
    """Where the control group is not visible, only the absence of any OOM kill is conclusive."""
    hosts = HostProcesses(tmp_path, tmp_path / "no-cgroups")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").write_text("9 3 0 0 0 0 0")
    (tmp_path / "7" / "cgroup").write_text("0::/../other")
    (tmp_path / "vmstat").write_text("oom_kill 2")
    [alive] = hosts.update([published("running")])
    (tmp_path / "vmstat").write_text(f"oom_kill {kills_on_node}")
    dead = hosts.update([published("killed")])
    families = list(hosts.families(dead))

    assert alive.sample.host is not None
    assert (alive.sample.host.limit_bytes, alive.sample.host.available_bytes) == (64, 20)
    assert {s.labels["cause"]: s.value for f in families for s in f.samples} == expected


def test_a_process_that_ends_during_a_scrape_keeps_the_counts_from_before(tmp_path: Path) -> None:
    """An OOM kill between the check for life and the reading of the counts is not lost."""
    hosts = HostProcesses(tmp_path, tmp_path / "cgroup")
    group = tmp_path / "cgroup" / "job"
    for path, text in {
        tmp_path / "7" / "statm": "9 3 0 0 0 0 0",
        tmp_path / "7" / "cgroup": "0::/job",
        group / "memory.events": "oom_kill 0",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    hosts.update([published("running")])
    (group / "memory.events").write_text("oom_kill 1")
    (tmp_path / "7" / "statm").write_text("0 0 0 0 0 0 0")
    hosts.update([published("running")])
    dead = hosts.update([published("killed")])
    rows = [sample for family in hosts.families(dead) for sample in family.samples]

    assert {row.labels["cause"]: row.value for row in rows} == {"host_memory": 1, "signal": 0}
