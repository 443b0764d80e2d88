"""MIG: instances with their memory and processes beside the whole GPU, through every reconfiguration."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.exposition import scrape
from support.nvml_binding import GIB, FakeBinding, process, uuid_of
from support.publishing import own_sample, publish

from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpu import GpuIdentity
from torchmem.exporter.nvml import PyNvml
from torchmem.exporter.testing import FakeGpu, FakeNvml
from torchmem.exporter.values import MemoryInfo, Mig, MigInstance, ProcessMemory

OpenExporter = Callable[..., Exporter]
OUTSIDE, RESERVED = "torchmem_outside_allocator_bytes", "torchmem_reserved_peak_bytes"
PARENT, MIG_A, MIG_B = "GPU-51e0de70-0000-4000-8000-000000000000", uuid_of((0, 1)), uuid_of((0, 2))
NO_PERMISSION, INVALID_ARGUMENT = 4, 2


def test_instances_beside_their_gpu(open_exporter: OpenExporter) -> None:
    """Memory stands once for each GPU instance, however many compute instances share it; the GPU keeps its own."""
    binding = FakeBinding(2)
    binding.cut(0, [(1, 0), (1, 1), (5, 0)])
    shown = scrape(open_exporter(PyNvml(binding)))

    assert {"0": 1.0, "1": 0.0} == shown.by("gpu", "nvml_mig_enabled")
    assert {"1": 10.0 * GIB, "5": 10.0 * GIB} == shown.by(
        "gpu_instance", "nvml_mig_memory_total_bytes", gpu="0"
    )
    assert {"1": 2.0 * GIB, "5": 2.0 * GIB} == shown.by(
        "gpu_instance", "nvml_mig_memory_used_bytes"
    )
    assert {"1": 7.0 * GIB, "5": 7.0 * GIB} == shown.by(
        "gpu_instance", "nvml_mig_memory_free_bytes"
    )
    assert {"1": 1.0 * GIB, "5": 1.0 * GIB} == shown.by(
        "gpu_instance", "nvml_mig_memory_reserved_bytes"
    )
    assert {"0": 80.0 * GIB, "1": 80.0 * GIB} == shown.by("gpu", "nvml_memory_total_bytes")
    assert {("1", "0", MIG_A), ("1", "1", MIG_B), ("5", "0", uuid_of((0, 3)))} == {
        (labels["gpu_instance"], labels["compute_instance"], labels["mig_uuid"])
        for labels in map(dict, shown.matching("nvml_mig_info", gpu="0", profile="1g.10gb"))
    }


def test_reconfiguration_between_two_scrapes(open_exporter: OpenExporter) -> None:
    """Instances are enumerated anew: those that are gone leave no series, new ones with old ids are theirs."""
    binding = FakeBinding(1)
    binding.cut(0, [(1, 0), (5, 0)])
    exporter = open_exporter(PyNvml(binding))
    scrape(exporter)
    binding.cut(0, [(5, 0)])
    shown = scrape(exporter)

    assert {"5"} == set(shown.by("gpu_instance", "nvml_mig_memory_total_bytes"))
    assert {MIG_A} == set(shown.by("mig_uuid", "nvml_mig_info"))


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetUUID", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetMemoryInfo"]
)
def test_instance_that_is_taken_away_while_it_is_read(
    open_exporter: OpenExporter, name: str
) -> None:
    """A handle that died between two calls costs that instance, not the GPU."""
    binding = FakeBinding(1)
    binding.cut(0, [(1, 0), (5, 0)])
    binding.fail(name, INVALID_ARGUMENT, gpu=(0, 1))  # type: ignore[arg-type]
    shown = scrape(open_exporter(PyNvml(binding)))

    assert {"5"} == set(shown.by("gpu_instance", "nvml_mig_memory_total_bytes"))
    assert 1.0 == shown.value("nvml_gpu_up", gpu="0")


def test_processes_of_all_instances(open_exporter: OpenExporter) -> None:
    """In MIG mode the processes are those of the MIG devices, under the GPU they share."""
    binding = FakeBinding(2)
    binding.cut(0, [(1, 0), (5, 0)])
    shown = scrape(open_exporter(PyNvml(binding)))

    assert {"501": 1.0 * GIB, "502": 1.0 * GIB} == shown.by(
        "pid", "nvml_process_memory_bytes", gpu="0"
    )
    assert {"101": 2.0 * GIB} == shown.by("pid", "nvml_process_memory_bytes", gpu="1")


def test_process_on_two_instances_is_added_up(open_exporter: OpenExporter) -> None:
    """One pid on two MIG devices is one series of the GPU, with the bytes of both."""
    binding = FakeBinding(1)
    binding.cut(0, [(1, 0), (5, 0)])
    binding.answers["nvmlDeviceGetComputeRunningProcesses_v3"] = lambda handle: [process(7, GIB)]
    shown = scrape(open_exporter(PyNvml(binding)))

    assert {"7": 2.0 * GIB} == shown.by("pid", "nvml_process_memory_bytes")
    assert 1.0 == shown.value("nvml_processes")


def test_list_of_one_instance_that_is_not_permitted_hides_all(open_exporter: OpenExporter) -> None:
    """Half of the processes would be a wrong count and a wrong rest."""
    binding = FakeBinding(1)
    binding.cut(0, [(1, 0), (5, 0)])
    binding.fail("nvmlDeviceGetComputeRunningProcesses_v3", NO_PERMISSION, gpu=(0, 2))  # type: ignore[arg-type]
    shown = scrape(open_exporter(PyNvml(binding)))

    assert {} == shown.matching("nvml_processes") | shown.matching("nvml_unattributed_memory_bytes")


def sliced(
    *rows: ProcessMemory, index: int = 3, instances: tuple[tuple[str, int], ...] = ((MIG_A, 1),)
) -> FakeGpu:
    """A GPU in MIG mode with these instances (UUID, GPU instance) and processes."""
    memory = MemoryInfo(80 * GIB, 62 * GIB, 17 * GIB, GIB)
    found = [MigInstance(uuid, number, 0, "7g.80gb", memory) for uuid, number in instances]
    return FakeGpu(GpuIdentity(index, PARENT), memory, mig=Mig(True, found), processes=rows)


def reserved_bytes() -> int:
    """Reserved bytes of the published sample."""
    allocator = own_sample().devices[0].allocator
    assert allocator is not None
    return allocator.reserved_bytes.total


@pytest.mark.parametrize(
    "name", [MIG_A, f"MIG-{PARENT}/1/0"], ids=["UUID", "name before driver 470"]
)
def test_rank_on_an_instance_is_joined(
    open_exporter: OpenExporter, run_dir: Path, name: str
) -> None:
    """A rank that knows its MIG device has the index of the GPU, and its remainder from that device's bytes."""
    publish(run_dir, own_sample(uuid=name))
    rows = [
        ProcessMemory(os.getpid(), reserved_bytes() + 700, MIG_A),
        ProcessMemory(os.getpid(), 5 * GIB, MIG_B),
    ]
    gpu = sliced(*rows, instances=((MIG_A, 1), (MIG_B, 2)))
    shown = scrape(open_exporter(FakeNvml.of(gpu)))

    assert 700.0 == shown.value(OUTSIDE, gpu="3", uuid=name, pid=str(os.getpid()))
    assert {"3"} == set(shown.by("gpu", RESERVED))


def test_index_stays_while_the_driver_is_silent(open_exporter: OpenExporter, run_dir: Path) -> None:
    """The series of a rank on a MIG device keep their labels when a reading fails."""
    publish(run_dir, own_sample(uuid=MIG_A))
    gpu = sliced()
    cards = [gpu]
    exporter = open_exporter(FakeNvml(lambda: cards))
    before = scrape(exporter)
    cards[0] = replace(gpu, error_code=15)
    after = scrape(exporter)

    assert before.series[RESERVED].keys() == after.series[RESERVED].keys()
    assert {"3"} == set(after.by("gpu", RESERVED))


def test_rank_on_an_unknown_instance_is_not_joined(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """A MIG device that NVML does not list has no index and no remainder."""
    publish(run_dir, own_sample(uuid=MIG_B))
    shown = scrape(open_exporter(FakeNvml.of(sliced(ProcessMemory(os.getpid(), 70 * GIB, MIG_A)))))

    assert {} == shown.matching(OUTSIDE)
    assert {""} == set(shown.by("gpu", RESERVED))
