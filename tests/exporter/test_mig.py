"""MIG: instances with their memory and processes beside the whole GPU, also after a change."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.exposition import scrape
from support.fake_nvml import FakeNode
from support.publishing import own_sample, publish

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.mig import Mig, MigInstance
from torchmem.exporter.subjects.processes import Processes, ProcessMemory

OpenExporter = Callable[..., Exporter]
OUTSIDE, RESERVED = "torchmem_outside_allocator_bytes", "torchmem_reserved_peak_bytes"
GIB = 1 << 30
DRIVER_FREE = own_sample().devices[0].driver_free_bytes or 0
PARENT = "GPU-51e0de70-0000-4000-8000-000000000000"
MIG_A, MIG_B, MIG_C = (f"MIG-{letter}1e0de70-0000-4000-8000-000000000000" for letter in "abc")
WHOLE = f"""
[gpu *]
MemoryInfo = {80 * GIB} {GIB} {77 * GIB} {2 * GIB}
MigMode = 0 0
MaxMigDeviceCount = 7
GraphicsRunningProcesses =
MPSComputeRunningProcesses =
[mig *]
MemoryInfo = {10 * GIB} {GIB} {7 * GIB} {2 * GIB}
GraphicsRunningProcesses =
MPSComputeRunningProcesses =
[gpu 0]
UUID = {PARENT}
MigMode = 1 1
[gpu 1]
UUID = GPU-b
ComputeRunningProcesses = 101:{2 * GIB}
"""


def partitioned(folder: Path, *instances: tuple[str, int, int]) -> FakeNode:
    """Return a node whose GPU 0 has these MIG devices: (UUID, GPU instance, compute instance).

    The MIG devices have gaps in their indices, and one process each, 501, 502 and so on.
    """
    node = FakeNode(folder, "zero_gpus")
    sections = [
        f"[mig 0/{number}]\nUUID = {uuid}\nName = NVIDIA H100 80GB HBM3 MIG 1g.10gb\n"
        f"GpuInstanceId = {gpu_instance}\nComputeInstanceId = {compute_instance}\n"
        f"ComputeRunningProcesses = {500 + number}:{GIB}\n"
        for number, (uuid, gpu_instance, compute_instance) in enumerate(instances, start=1)
    ]
    node.write(WHOLE + "".join(sections))
    return node


def test_instances_beside_their_gpu(open_exporter: OpenExporter, tmp_path: Path) -> None:
    """Compute instances share the memory of their GPU instance; the GPU keeps its own."""
    node = partitioned(tmp_path / "node", (MIG_A, 1, 0), (MIG_B, 1, 1), (MIG_C, 5, 0))
    exposition = scrape(open_exporter(node.nvml()))
    memory = {
        part: exposition.by("gpu_instance", f"nvml_mig_memory_{part}_bytes", gpu="0")
        for part in ("total", "used", "free", "reserved")
    }

    assert exposition.by("gpu", "nvml_mig_enabled") == {"0": 1.0, "1": 0.0}
    assert memory == {
        part: dict.fromkeys(("1", "5"), gib * float(GIB))
        for part, gib in (("total", 10), ("used", 2), ("free", 7), ("reserved", 1))
    }
    assert dict.fromkeys("01", 80.0 * GIB) == exposition.by("gpu", "nvml_memory_total_bytes")
    assert {
        (labels["gpu_instance"], labels["compute_instance"], labels["mig_uuid"])
        for labels in map(dict, exposition.matching("nvml_mig_info", gpu="0", profile="1g.10gb"))
    } == {("1", "0", MIG_A), ("1", "1", MIG_B), ("5", "0", MIG_C)}


def test_reconfiguration_between_two_scrapes(open_exporter: OpenExporter, tmp_path: Path) -> None:
    """Instances are listed in each scrape: those that are gone leave no series."""
    node = partitioned(tmp_path / "node", (MIG_A, 1, 0), (MIG_B, 5, 0))
    exporter = open_exporter(node.nvml())
    scrape(exporter)
    node.remove("mig 0/1")
    node.change("mig 0/2", UUID=MIG_C)
    exposition = scrape(exporter)

    assert set(exposition.by("gpu_instance", "nvml_mig_memory_total_bytes")) == {"5"}
    assert set(exposition.by("mig_uuid", "nvml_mig_info")) == {MIG_C}


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetUUID", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetMemoryInfo_v2"]
)
def test_instance_that_is_removed_while_it_is_read(
    open_exporter: OpenExporter, tmp_path: Path, name: str
) -> None:
    """A handle that becomes invalid between two calls costs that instance, not the GPU."""
    node = partitioned(tmp_path / "node", (MIG_A, 1, 0), (MIG_B, 5, 0))
    node.change("mig 0/1", **{name: "invalid_argument", "nvmlDeviceGetMemoryInfo": "#2"})
    exposition = scrape(open_exporter(node.nvml()))

    assert set(exposition.by("gpu_instance", "nvml_mig_memory_total_bytes")) == {"5"}
    assert exposition.value("nvml_gpu_up", gpu="0") == 1.0


def test_processes_of_all_instances(open_exporter: OpenExporter, tmp_path: Path) -> None:
    """In MIG mode the processes are those of the MIG devices, under the GPU that they share."""
    node = partitioned(tmp_path / "node", (MIG_A, 1, 0), (MIG_B, 5, 0))
    exposition = scrape(open_exporter(node.nvml()))
    memory = "nvml_process_memory_bytes"

    assert exposition.by("pid", memory, gpu="0") == {"501": 1.0 * GIB, "502": 1.0 * GIB}
    assert exposition.by("pid", memory, gpu="1") == {"101": 2.0 * GIB}


def test_process_on_two_instances_is_added_up(open_exporter: OpenExporter, tmp_path: Path) -> None:
    """One pid on two MIG devices is one series of the GPU, with the bytes of both."""
    node = partitioned(tmp_path / "node", (MIG_A, 1, 0), (MIG_B, 5, 0))
    node.change("mig 0/2", ComputeRunningProcesses=f"501:{GIB}")
    exposition = scrape(open_exporter(node.nvml()))

    assert exposition.by("pid", "nvml_process_memory_bytes", gpu="0") == {"501": 2.0 * GIB}
    assert exposition.value("nvml_processes", gpu="0") == 1.0


def test_one_list_without_permission_hides_all(open_exporter: OpenExporter, tmp_path: Path) -> None:
    """Half of the processes would be a wrong count and a wrong remainder."""
    node = partitioned(tmp_path / "node", (MIG_A, 1, 0), (MIG_B, 5, 0))
    node.change("mig 0/2", nvmlDeviceGetComputeRunningProcesses_v3="no_permission")
    exposition = scrape(open_exporter(node.nvml()))

    assert exposition.matching("nvml_processes", gpu="0") == {}
    assert exposition.matching("nvml_unattributed_memory_bytes", gpu="0") == {}


def sliced(
    *rows: ProcessMemory,
    instances: tuple[tuple[str, int], ...] = ((MIG_A, 1),),
    error_code: int | None = None,
) -> FakeGpu:
    """Return a GPU in MIG mode with these instances (UUID, GPU instance) and processes."""
    memory = MemoryInfo(80 * GIB, 62 * GIB, 17 * GIB, GIB)
    mig = Mig(True, [MigInstance(uuid, number, 0, "7g.80gb", memory) for uuid, number in instances])
    identity = GpuIdentity(3, PARENT)
    free: dict[str | None, int] = {uuid: DRIVER_FREE for uuid, _ in instances}
    processes = Processes(rows, memory=memory, free=free)
    return FakeGpu(identity, memory, mig, processes, error_code=error_code)


def reserved_bytes() -> int:
    """Return the reserved bytes of the published sample."""
    allocator = own_sample().devices[0].allocator
    assert allocator is not None
    return allocator.reserved_bytes.total


@pytest.mark.parametrize(
    "name", [MIG_A, f"MIG-{PARENT}/1/0"], ids=["UUID", "name before driver 470"]
)
def test_rank_on_an_instance_is_joined(
    open_exporter: OpenExporter, run_dir: Path, name: str
) -> None:
    """A rank on a MIG device has the GPU's index and a difference from the device's bytes."""
    sample = own_sample(uuid=name)
    publish(run_dir, replace(sample, devices=(replace(sample.devices[0], engine=None),)))
    rows = [
        ProcessMemory(os.getpid(), reserved_bytes() + 700, MIG_A),
        ProcessMemory(os.getpid(), 5 * GIB, MIG_B),
    ]
    gpu = sliced(*rows, instances=((MIG_A, 1), (MIG_B, 2)))
    exposition = scrape(open_exporter(FakeNvml.of(gpu)))

    assert exposition.value(OUTSIDE, gpu="3", uuid=name, pid=str(os.getpid())) == 700.0
    assert set(exposition.by("gpu", RESERVED)) == {"3"}


def test_index_is_kept_while_the_gpu_is_lost(open_exporter: OpenExporter, run_dir: Path) -> None:
    """The series of a rank on a MIG device keep their labels when a reading fails."""
    publish(run_dir, own_sample(uuid=MIG_A))
    fake_gpus = [sliced()]
    exporter = open_exporter(FakeNvml(lambda: fake_gpus))
    before = scrape(exporter)
    fake_gpus[0] = sliced(error_code=15)
    after = scrape(exporter)

    assert before.series[RESERVED].keys() == after.series[RESERVED].keys()
    assert set(after.by("gpu", RESERVED)) == {"3"}


def test_rank_on_an_unknown_instance_is_not_joined(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """A MIG device that NVML does not list has no index and no difference."""
    publish(run_dir, own_sample(uuid=MIG_B))
    exposition = scrape(
        open_exporter(FakeNvml.of(sliced(ProcessMemory(os.getpid(), 70 * GIB, MIG_A))))
    )

    assert exposition.matching(OUTSIDE) == {}
    assert set(exposition.by("gpu", RESERVED)) == {""}
