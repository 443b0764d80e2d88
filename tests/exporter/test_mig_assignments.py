"""Which MIG devices were given to whom, and how long those without a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from exporter.test_gpu_assignments import POD, Jobs
from exporter.test_mig import MIG_A, MIG_B, MIG_C, PARENT, partitioned
from support.exposition import scrape
from support.fake_nvml import FakeNode

from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpu_assignments import GpuAssignments
from torchmem.exporter.live.state import node_state
from torchmem.exporter.pod_names import AssignedContainer
from torchmem.exporter.slurm_jobs import SlurmJob

OpenExporter = Callable[..., Exporter]
INFO, EMPTY = "nvml_mig_assignment_info", "nvml_mig_assigned_empty_seconds"


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    """Three MIG devices on GPU 0, in GPU instances 1, 3 and 5; the last one has no process."""
    node = partitioned(tmp_path / "node", (MIG_A, 1, 0), (MIG_B, 3, 0), (MIG_C, 5, 0))
    node.change("mig 0/3", ComputeRunningProcesses="")
    for number, start in ((1, 0), (2, 2), (3, 4)):
        node.change(f"mig 0/{number}", GpuInstanceInfo=f"19 {start}")
    return node


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc in which GPU 0 is /dev/nvidia3."""
    folder = tmp_path / "proc" / "driver" / "nvidia" / "gpus" / "0000:18:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text(f"GPU UUID: \t {PARENT}\nDevice Minor: \t 3\n")
    return tmp_path / "proc"


def test_mig_devices_of_a_pod(open_exporter: OpenExporter, node: FakeNode, proc: Path) -> None:
    """One that is used is not empty; the other one is told above its GPU's bar in ten minutes."""
    pods = [AssignedContainer(POD, frozenset({MIG_A, f"{MIG_C}::0"}))]
    moments = iter((0.0, 660.0))
    assignments = GpuAssignments(lambda: pods, proc=proc, clock=moments.__next__)
    exporter = open_exporter(node.nvml(), assignments=assignments)
    first, later = scrape(exporter), scrape(exporter)
    (note,) = node_state(exporter.found()).gpus[0].notes

    assert first.by("gpu_instance", EMPTY, gpu="0", uuid=PARENT) == {"1": 0.0, "5": 0.0}
    assert later.by("gpu_instance", EMPTY, gpu="0", uuid=PARENT) == {"1": 0.0, "5": 660.0}
    assert [POD.labels().items() <= dict(labels).items() for labels in later.matching(INFO)] == [
        True,
        True,
    ]
    assert note.text == (
        "MIG device 1g.10gb (GPU instance 5, compute instance 0): assigned to pod research/gpt-0, "
        "without a process for 11 min 0 s."
    )


@pytest.mark.parametrize(
    ("claimed", "expected"),
    [
        ("gpu-3-mig-1g10gb-19-4", {"5"}),
        ("gpu-3-mig-1g.10gb-19-2", {"3"}),
        ("gpu-3-mig-1g10gb-19-6", set()),
        ("gpu-4-mig-1g10gb-19-4", set()),
        ("gpu-3", set()),
    ],
    ids=["by its place", "with a dot", "no such place", "another GPU", "the GPU in MIG mode"],
)
def test_mig_devices_that_are_claimed_by_dra(
    open_exporter: OpenExporter, node: FakeNode, proc: Path, claimed: str, expected: set[str]
) -> None:
    """DRA names the GPU by its device file, and the MIG device by profile and place."""
    pods = [AssignedContainer(POD, claimed=frozenset({claimed}))]
    exposition = scrape(
        open_exporter(node.nvml(), assignments=GpuAssignments(lambda: pods, proc=proc))
    )

    assert set(exposition.by("gpu_instance", EMPTY)) == expected
    assert exposition.matching("nvml_gpu_assigned_empty_seconds") == {}


def given_by_slurm(
    open_exporter: OpenExporter, node: FakeNode, proc: Path, jobs: Sequence[SlurmJob]
) -> Mapping[str, str]:
    """Return the job of each GPU instance."""
    known = Jobs({job.id: job for job in jobs})
    assignments = GpuAssignments(jobs=known, proc=proc)
    exposition = scrape(open_exporter(node.nvml(), assignments=assignments))
    assert exposition.matching("nvml_gpu_assignment_info") == {}
    rows = map(dict, exposition.matching(INFO))
    return {labels["gpu_instance"]: labels["slurm_job_id"] for labels in rows}


def test_mig_devices_of_a_slurm_job(
    open_exporter: OpenExporter, node: FakeNode, proc: Path
) -> None:
    """Slurm says how many of a profile a job has: they are known if these are all.

    Its numbers count MIG devices, so they say nothing about whole GPUs either.
    """
    node.change("mig 0/3", Name="NVIDIA H100 80GB HBM3 MIG 2g.20gb")
    small, large = "1g.10gb", "2g.20gb"
    jobs = [SlurmJob("7", profiles=(small,)), SlurmJob("8", gpus=frozenset({3}), profiles=(large,))]

    assert given_by_slurm(open_exporter, node, proc, jobs) == {"5": "8"}
    assert given_by_slurm(open_exporter, node, proc, [SlurmJob("7", profiles=(small, small))]) == {
        "1": "7",
        "3": "7",
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"nvmlDeviceGetComputeRunningProcesses_v3": "no_permission"}, set()),
        ({"nvmlDeviceGetGpuInstanceById": "no_permission"}, {"3"}),
    ],
    ids=["the processes", "the place"],
)
def test_without_permission(
    open_exporter: OpenExporter,
    node: FakeNode,
    proc: Path,
    changes: dict[str, str],
    expected: set[str],
) -> None:
    """Where NVML may not list the processes, nothing is known; without places, DRA's are not."""
    pods = [AssignedContainer(POD, frozenset({MIG_B}), frozenset({"gpu-3-mig-1g10gb-19-4"}))]
    for section in ("gpu *", "mig *"):
        node.change(section, **changes)
    exposition = scrape(
        open_exporter(node.nvml(), assignments=GpuAssignments(lambda: pods, proc=proc))
    )

    assert set(exposition.by("gpu_instance", EMPTY)) == expected
    assert {dict(labels)["gpu_instance"] for labels in exposition.matching(INFO)} == expected
