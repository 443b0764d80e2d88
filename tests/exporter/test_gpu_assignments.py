"""Who was given which GPU, and how long those without a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.exposition import Exposition, scrape
from support.publishing import own_process, own_sample

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.doctor import holders
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpu_assignments import GpuAssignments, minor_numbers
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.live.state import node_state
from torchmem.exporter.pod_names import AssignedContainer, PodContainer, PodNames
from torchmem.exporter.process_owners import ProcessOwners
from torchmem.exporter.reading import CollectorResult, Reading
from torchmem.exporter.slurm_jobs import SlurmJob
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.processes import (
    Processes,
    ProcessMemory,
    families,
    process_facts,
)
from torchmem.node.published import Published

OpenExporter = Callable[..., Exporter]
INFO, EMPTY = "nvml_gpu_assignment_info", "nvml_gpu_assigned_empty_seconds"
UUIDS = ("GPU-a", "GPU-b")
POD = PodContainer("gpt-0", "research", "trainer")
SLUID = "s5K1KKYAYG5D00"


def proc(tmp_path: Path) -> Path:
    """Return a /proc in which GPU-a is /dev/nvidia1 and GPU-b is /dev/nvidia0."""
    for minor, uuid in enumerate(reversed(UUIDS)):
        folder = tmp_path / "proc" / "driver" / "nvidia" / "gpus" / f"0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        )
    return tmp_path / "proc"


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a node."""

    known: Mapping[str, SlurmJob]

    def __call__(self) -> Mapping[str, SlurmJob]:
        """Return them."""
        return self.known

    def close(self) -> None:
        """Do nothing."""


class Node:
    """An exporter of two GPUs, whose time and whose processes a test sets."""

    def __init__(
        self,
        open_exporter: OpenExporter,
        proc: Path,
        pods: Sequence[AssignedContainer] = (),
        jobs: Mapping[str, SlurmJob] | None = None,
    ) -> None:
        self.now = 0.0
        self.pids: dict[str, list[int]] = {}
        assignments = GpuAssignments(lambda: pods, Jobs(jobs or {}), proc, lambda: self.now)
        self.exporter = open_exporter(FakeNvml(self._gpus), assignments=assignments)

    def _gpus(self) -> list[FakeGpu]:
        return [self._gpu(index, uuid) for index, uuid in enumerate(UUIDS)]

    def _gpu(self, index: int, uuid: str) -> FakeGpu:
        rows = [ProcessMemory(pid, 5) for pid in self.pids.get(uuid, ())]
        memory = MemoryInfo(1000, 5 * len(rows), 1000 - 5 * len(rows), 0)
        return FakeGpu(GpuIdentity(index, uuid), memory, Processes(rows, {}, memory))

    def scrape(self, after: float = 0.0) -> Exposition:
        """Scrape some seconds after the last time."""
        self.now += after
        return scrape(self.exporter)


def test_a_gpu_of_a_pod_without_a_process(open_exporter: OpenExporter, tmp_path: Path) -> None:
    """It is empty from the first scrape until a process starts; the other GPU is not assigned."""
    node = Node(open_exporter, proc(tmp_path), [AssignedContainer(POD, frozenset({"GPU-a::0"}))])
    seconds = [node.scrape().by("uuid", EMPTY), node.scrape(after=60).by("uuid", EMPTY)]
    node.pids = {"GPU-a": [os.getpid()]}
    used = node.scrape(after=60)
    (labels,) = used.matching(INFO)

    assert [*seconds, used.by("uuid", EMPTY)] == [{"GPU-a": 0.0}, {"GPU-a": 60.0}, {"GPU-a": 0.0}]
    assert {"uuid": "GPU-a", **POD.labels()}.items() <= dict(labels).items()


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (AssignedContainer(POD, claimed=frozenset({"gpu-0"})), {"GPU-b"}),
        (AssignedContainer(POD, claimed=frozenset({"gpu-0-mig-1g.10gb-19-0"})), set()),
        (AssignedContainer(POD, frozenset({"MIG-1"})), set()),
        (AssignedContainer(POD, claimed=frozenset({"gpu-7"})), set()),
    ],
    ids=["claimed by DRA", "a MIG device by DRA", "a MIG device", "a GPU that is not here"],
)
def test_what_a_container_has(
    open_exporter: OpenExporter, tmp_path: Path, container: AssignedContainer, expected: set[str]
) -> None:
    """DRA counts GPUs by their device, as in /dev/nvidia0; parts of a GPU are not told."""
    node = Node(open_exporter, proc(tmp_path), [container])

    assert set(node.scrape().by("uuid", EMPTY)) == expected


def test_a_gpu_of_a_slurm_job(open_exporter: OpenExporter, tmp_path: Path) -> None:
    """Ten minutes without a process later, the page says whose it is and what to do."""
    job = SlurmJob("77", "mia", "vision", frozenset({1}))
    node = Node(open_exporter, proc(tmp_path), jobs={SLUID: job})
    node.scrape()
    assert node_state(node.exporter.found()).gpus[0].notes == ()
    (labels,) = node.scrape(after=660).matching(INFO)
    (note,) = node_state(node.exporter.found()).gpus[0].notes

    expected = {"uuid": "GPU-a", "slurm_job_id": "77", "user": "mia", "account": "vision"}
    assert expected.items() <= dict(labels).items()
    assert note.kind == "assigned_empty"
    assert note.text == "Assigned to Slurm job 77 of mia, without a process for 11 min 0 s."


def test_numbers_that_cannot_be_right(open_exporter: OpenExporter, tmp_path: Path) -> None:
    """If a process of a job is on a GPU that is not its by Slurm's numbers, these are not used."""
    job = SlurmJob("77", "mia", None, frozenset({1}))
    reading = Reading(FakeNvml.of(), present=tuple(map(GpuIdentity, range(2), UUIDS)))
    nvml = Node(open_exporter, proc(tmp_path))
    nvml.pids = {"GPU-b": [7]}
    reading.nvml = FakeNvml(nvml._gpus)  # noqa: SLF001 - the same GPUs
    reading.nvml.count()
    reading.read(Processes)
    assignments = GpuAssignments(proc=tmp_path / "proc")

    assert set(assignments.update(reading, {}, {SLUID: job})) == {"GPU-a"}
    assert set(assignments.update(reading, {7: {"slurm_job_id": "8"}}, {SLUID: job})) == {"GPU-a"}
    assert set(assignments.update(reading, {7: {"slurm_job_id": "77"}}, {SLUID: job})) == set()


def test_nobody_is_asked_by_default(open_exporter: OpenExporter) -> None:
    """Without the settings, these series are absent."""
    exposition = scrape(open_exporter(FakeNvml.of(FakeGpu(GpuIdentity(0, "GPU-a"), Processes()))))

    assert (exposition.matching(INFO), exposition.matching(EMPTY)) == ({}, {})


def test_without_the_drivers_proc(tmp_path: Path) -> None:
    """In a container that does not have it, no number belongs to a GPU."""
    assert minor_numbers(tmp_path) == {}


@pytest.mark.parametrize(
    ("jobs", "labels", "expected"),
    [
        ({SLUID: SlurmJob("77")}, {"slurm_job_id": "8"}, "77"),
        ({}, {"slurm_job_id": "77"}, "77"),
        ({}, {}, None),
    ],
    ids=["by scontrol", "by the environment of the rank", "unknown"],
)
def test_the_job_of_a_process_whose_control_group_has_a_sluid(
    tmp_path: Path, jobs: Mapping[str, SlurmJob], labels: dict[str, str], expected: str | None
) -> None:
    """Slurm is believed before the rank; without both, doctor says what to do."""
    entry = tmp_path / "7"
    entry.mkdir()
    (entry / "comm").write_text("python\n")
    (entry / "status").write_text("Uid:\t1000\t1000\t1000\t1000\n")
    (entry / "cgroup").write_text(f"0::/../system.slice/slurmstepd.scope/{SLUID}/step_0\n")
    gpu = FakeGpu(GpuIdentity(0, "GPU-a"), Processes([ProcessMemory(7, 5)]))
    reading = Reading(FakeNvml.of(gpu), present=(gpu.identity,))
    reading.nvml.count()
    reading.results = (CollectorResult("processes", tuple(families(reading))),)
    item = Published(own_sample(process=own_process(labels=labels)), 7, "running", attributed=True)
    owners = ProcessOwners(tmp_path, lambda _: None)
    facts = process_facts(reading, [item], owners, PodNames(tmp_path), jobs)
    checks = list(holders.checks({"nvml_process_info": [(facts[7], 1.0)]}))

    assert facts[7].get("slurm_job_id") == expected
    assert facts[7]["slurm_sluid"] == SLUID
    assert ["--scontrol" in (check.next_step or "") for check in checks] == [True] * (not expected)
