"""Memory of processes that are gone: NVML lists them, and the kernel has no such process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exposition import Exposition, scrape
from support.publishing import own_process, own_sample, publish
from support.samples import UUID

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.live.state import node_state
from torchmem.exporter.reading import Reading
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.dead_processes import MIN_SECONDS, DeadProcesses
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.processes import Processes, ProcessMemory
from torchmem.host.process_table import is_gone
from torchmem.node.gpu_holders import DeadProcess
from torchmem.node.published import Published
from torchmem.node.why import rank_why
from torchmem.sample.sample import MAX_PID

OpenExporter = Callable[..., Exporter]
DEAD, INFO = "nvml_dead_process_memory_bytes", "nvml_process_info"
GPU = GpuIdentity(0, UUID)
TOTAL = 1000


def gpu_with(*rows: ProcessMemory, mps: Sequence[int] = ()) -> FakeGpu:
    """Return a GPU of 1000 bytes with these processes, and no other memory in use."""
    used = sum(row.used_bytes or 0 for row in rows)
    memory = MemoryInfo(TOTAL, used, TOTAL - used, 0)
    return FakeGpu(GPU, memory, Processes(rows, {}, memory, mps_pids=frozenset(mps)))


class Node:
    """An exporter whose time a test sets, and the processes that NVML lists."""

    def __init__(self, open_exporter: OpenExporter, namespace: int | None = None) -> None:
        self.now = 0.0
        self.gpu = gpu_with()
        nvml = FakeNvml(lambda: [self.gpu], namespace=namespace)
        self.exporter = open_exporter(nvml, dead=DeadProcesses(clock=lambda: self.now))

    def scrape(self, after: float = MIN_SECONDS) -> Exposition:
        """Scrape some seconds after the last time."""
        self.now += after
        return scrape(self.exporter)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a signal."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def all_dead(*times: float) -> DeadProcesses:
    """Return what sees no process, and looks at these times."""
    return DeadProcesses(lambda _: True, iter(times).__next__)


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill a process and wait until it is gone."""
    child.kill()
    child.wait()


def test_memory_of_a_killed_process(
    open_exporter: OpenExporter, child: subprocess.Popen[bytes]
) -> None:
    """While it lives there is none; once it is gone for two scrapes, its bytes are dead."""
    node = Node(open_exporter)
    node.gpu = gpu_with(ProcessMemory(child.pid, 300), ProcessMemory(os.getpid(), 200))
    alive = [node.scrape().value(DEAD), node.scrape().value(DEAD)]
    end(child)
    gone = [node.scrape().value(DEAD), node.scrape().value(DEAD)]

    assert [*alive, *gone] == [0.0, 0.0, 0.0, 300.0]


def test_a_process_that_ends_between_two_looks_is_not_dead_memory(
    open_exporter: OpenExporter, child: subprocess.Popen[bytes]
) -> None:
    """Neither a second scrape right after the first nor a later one without it says so."""
    node = Node(open_exporter)
    end(child)
    node.gpu = gpu_with(ProcessMemory(child.pid, 300))
    at_once = [node.scrape().value(DEAD), node.scrape(after=1.0).value(DEAD)]
    node.gpu = gpu_with()

    assert [*at_once, node.scrape().value(DEAD)] == [0.0, 0.0, 0.0]


def test_one_reading_that_is_looked_at_again_proves_nothing() -> None:
    """While the driver hangs, the same list of processes is served for minutes."""
    reading = Reading(FakeNvml.of(gpu_with(ProcessMemory(7, 300))), present=(GPU,))
    reading.nvml.count()
    reading.read(Processes)
    dead = all_dead(0.0, 60.0, 61.0)
    seen = [dead.update(reading, {}, ())[UUID] for _ in range(2)]

    assert seen == [[], []]
    later = Reading(reading.nvml, present=(GPU,))
    later.read(Processes)
    assert dead.update(later, {}, ())[UUID] == [DeadProcess(7, 300)]


def test_in_a_pid_namespace_of_its_own_nothing_is_claimed(
    open_exporter: OpenExporter, child: subprocess.Popen[bytes]
) -> None:
    """An exporter in a container without the host's pids has no such series."""
    end(child)
    node = Node(open_exporter, namespace=1)
    node.gpu = gpu_with(ProcessMemory(child.pid, 300))

    assert [node.scrape().matching(DEAD), node.scrape().matching(DEAD)] == [{}, {}]


def test_pids_of_others_are_not_looked_up(
    open_exporter: OpenExporter, child: subprocess.Popen[bytes]
) -> None:
    """Numbers that Linux never assigns, and clients of MPS, are not called dead."""
    end(child)
    node = Node(open_exporter)
    rows = ProcessMemory(MAX_PID, 300), ProcessMemory(child.pid, 200)
    node.gpu = gpu_with(*rows, mps=[child.pid])

    assert [node.scrape().value(DEAD), node.scrape().value(DEAD)] == [0.0, 0.0]


def test_a_dead_process_keeps_its_facts(
    open_exporter: OpenExporter, child: subprocess.Popen[bytes]
) -> None:
    """Name and user of a process are still known after its end, with the state dead."""
    node = Node(open_exporter)
    node.gpu = gpu_with(ProcessMemory(child.pid, 300))
    node.scrape()
    end(child)
    node.scrape()
    (labels,) = node.scrape().matching(INFO, pid=str(child.pid))

    known = {"name": "sleep", "uid": str(os.geteuid()), "state": "dead"}
    assert known.items() <= dict(labels).items()


def test_a_restarted_exporter_knows_a_dead_rank_by_its_sample(
    open_exporter: OpenExporter, run_dir: Path, child: subprocess.Popen[bytes]
) -> None:
    """The last sample of a process says which rank it was, if pid, namespace and GPU agree."""
    end(child)
    publish(run_dir, own_sample(process=own_process(pid=child.pid, start_ticks=1, rank=3)))
    node = Node(open_exporter)
    node.gpu = gpu_with(ProcessMemory(child.pid, 300))
    node.scrape()
    (labels,) = node.scrape().matching(INFO, pid=str(child.pid))

    assert {"rank": "3", "run": "night", "state": "dead"}.items() <= dict(labels).items()


@pytest.mark.parametrize(
    ("states", "expected"),
    [(["S"], False), (["Z"], True), (["Z", "S"], False), (["Z", "Z", "X"], True)],
    ids=["runs", "zombie", "only its first thread has ended", "all threads have ended"],
)
def test_a_process_is_gone_when_no_thread_is_left(
    tmp_path: Path, states: Sequence[str], expected: bool
) -> None:
    """A process that is being torn down, or whose main thread has ended, is not gone."""
    pid = os.getpid()  # signals find it; /proc says what the test wants
    folder = tmp_path / str(pid)
    for number, state in enumerate(states):
        thread = folder / "task" / str(pid + number)
        thread.mkdir(parents=True)
        (thread / "stat").write_text(f"{pid} (sleep) {state} " + "0 " * 18 + "7")
    (folder / "stat").write_text((folder / "task" / str(pid) / "stat").read_text())

    assert is_gone(pid, tmp_path) is expected


def test_why_names_the_previous_launch(
    open_exporter: OpenExporter, run_dir: Path, child: subprocess.Popen[bytes]
) -> None:
    """After a restart, the report of a rank says that its predecessor still holds memory."""
    uid = os.geteuid()
    before = own_process(pid=child.pid, start_ticks=1, launch=f"{uid}-00000001")
    publish(run_dir, own_sample(process=before))
    publish(run_dir, own_sample(process=own_process(launch=f"{uid}-00000002")))
    end(child)
    node = Node(open_exporter)
    node.gpu = gpu_with(ProcessMemory(child.pid, 300), ProcessMemory(os.getpid(), 1))
    node.scrape()
    node.scrape()
    found = node.exporter.found()
    (item,) = (item for item in found.published if item.pid == os.getpid())
    why = rank_why(found, item, item.sample.devices[0], may_look=True)

    assert why.facts[0].text.startswith(
        f"The previous launch of this run, dead, still holds 300 bytes here (pid {child.pid}). "
        "300 bytes is held by 1 process that is gone: "
    )
    assert why.advice[0].kind == "dead_processes"


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=12), st.integers(1, 14))
def test_parts_add_up(processes: list[tuple[int, bool]], most: int) -> None:
    """Dead or not, the processes and what belongs to none are the used memory; so are the parts.

    Whatever the limit of series, the dead bytes are those of the dead processes.
    """
    rows = [ProcessMemory(pid, size) for pid, (size, _) in enumerate(processes, start=1)]
    dead = {pid for pid, (_, is_dead) in enumerate(processes, start=1) if is_dead}
    exporter = Exporter(
        FakeNvml.of(gpu_with(*rows)),
        RunDirectory(Path("absent")),
        processes_per_gpu=most,
        dead=DeadProcesses(lambda pid: pid in dead, iter((0.0, MIN_SECONDS)).__next__),
    )
    scrape(exporter)
    exposition = scrape(exporter)
    exporter.close()
    (gpu,) = node_state(exporter.found()).gpus
    of_processes = sum(exposition.by("pid", "nvml_process_memory_bytes").values())

    used = exposition.value("nvml_memory_used_bytes")
    assert of_processes + (exposition.value("nvml_unattributed_memory_bytes") or 0) == used
    assert exposition.value(DEAD) == sum(size for size, is_dead in processes if is_dead)
    assert sum(part.bytes for part in gpu.parts) == TOTAL
    assert bool(gpu.notes) is any(size and is_dead for size, is_dead in processes)


def test_a_sample_names_only_its_own_gpu(run_dir: Path) -> None:
    """A sample of the same pid on another GPU says nothing about the dead process."""
    item = Published(own_sample("GPU-other"), 7, "killed", attributed=False)
    reading = Reading(FakeNvml.of(gpu_with(ProcessMemory(7, 300))), present=(GPU,))
    later = Reading(reading.nvml, present=(GPU,))
    reading.nvml.count()
    dead = all_dead(0.0, MIN_SECONDS)
    for each in (reading, later):
        each.read(Processes)
        found = dead.update(each, {}, [item])

    assert found[UUID] == [DeadProcess(7, 300)]
