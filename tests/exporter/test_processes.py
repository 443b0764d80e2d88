"""Processes on GPUs: memory, utilization and owners."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.processes import (
    MAX_PROCESSES_PER_NODE,
    Processes,
    ProcessMemory,
    ProcessUtilization,
)

OpenExporter = Callable[..., Exporter]
MEMORY_OF, INFO = "nvml_process_memory_bytes", "nvml_process_info"
TOTAL = 1000


def fake_gpu(
    *rows: ProcessMemory,
    used: int = 600,
    reserved: int | None = 100,
    index: int = 0,
    utilization: Mapping[int, ProcessUtilization] | None = None,
) -> FakeGpu:
    """Return a GPU of 1000 bytes with these processes."""
    identity = GpuIdentity(index, f"{UUID[:-1]}{index}")
    memory = MemoryInfo(TOTAL, used, TOTAL - used - (reserved or 0), reserved)
    return FakeGpu(identity, memory, Processes(rows, utilization or {}, memory))


def scrape_gpus(open_exporter: OpenExporter, *fake_gpus: FakeGpu, **settings: int) -> Exposition:
    """Scrape a node with these GPUs once."""
    return scrape(open_exporter(FakeNvml.of(*fake_gpus), **settings))


def test_largest_have_series_and_the_others_a_sum(open_exporter: OpenExporter) -> None:
    """With a limit of three, the other two of five are pid="other"; all five are counted."""
    rows = [
        ProcessMemory(pid, used) for pid, used in ((11, 5), (12, 300), (13, 7), (14, 100), (15, 90))
    ]
    exposition = scrape_gpus(open_exporter, fake_gpu(*rows), processes_per_gpu=3)

    assert exposition.by("pid", MEMORY_OF) == {"12": 300.0, "14": 100.0, "15": 90.0, "other": 12.0}
    assert exposition.value("nvml_processes", gpu="0") == 5.0


used_bytes = st.lists(st.none() | st.integers(0, TOTAL), max_size=12)


@given(used_bytes, st.integers(1, 14))
def test_series_add_up(sizes: list[int | None], most: int) -> None:
    """Whatever the limit, the series of a GPU add up to the bytes of its processes."""
    rows = [ProcessMemory(pid, size) for pid, size in enumerate(sizes, start=1)]
    exporter = Exporter(
        FakeNvml.of(fake_gpu(*rows)), RunDirectory(Path("absent")), processes_per_gpu=most
    )
    exposition = scrape(exporter)
    exporter.close()

    assert sum(size for size in sizes if size) == sum(exposition.by("pid", MEMORY_OF).values())
    assert len(exposition.by("pid", MEMORY_OF)) <= most + 1
    assert float(len(sizes)) == exposition.value("nvml_processes")


def test_series_of_a_node_are_bounded(open_exporter: OpenExporter) -> None:
    """A limit of a million does not fill Prometheus."""
    rows = [ProcessMemory(pid, 1) for pid in range(1 << 22, (1 << 22) + 900)]
    fake_gpus = [fake_gpu(*rows, index=index) for index in range(4)]
    exposition = scrape_gpus(open_exporter, *fake_gpus, processes_per_gpu=10**6)

    assert len(exposition.matching(MEMORY_OF)) == MAX_PROCESSES_PER_NODE + 4


def test_idle_gpu_has_no_processes(open_exporter: OpenExporter) -> None:
    """An empty list means 0 processes; an unavailable list has no series."""
    exposition = scrape_gpus(open_exporter, fake_gpu(index=0), FakeGpu(GpuIdentity(1, "GPU-b")))

    assert exposition.by("gpu", "nvml_processes") == {"0": 0.0}
    assert exposition.matching(MEMORY_OF) == {}


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (fake_gpu(ProcessMemory(11, 400), ProcessMemory(12, 150)), 50.0),
        (fake_gpu(), 600.0),
        (fake_gpu(ProcessMemory(11, 600)), 0.0),
        (fake_gpu(ProcessMemory(11, 601)), None),
        (fake_gpu(ProcessMemory(11, None)), None),
        (fake_gpu(ProcessMemory(11, 5), reserved=None), None),
        (FakeGpu(GpuIdentity(0, "GPU-a"), Processes([ProcessMemory(11, 5)])), None),
    ],
    ids=[
        "rest",
        "no process",
        "nothing left",
        "more than used",
        "unknown bytes",
        "first version",
        "unified memory",
    ],
)
def test_unattributed_memory(
    open_exporter: OpenExporter, gpu: FakeGpu, expected: float | None
) -> None:
    """Used bytes minus those of processes; absent unless all are known, never negative."""
    assert scrape_gpus(open_exporter, gpu).value("nvml_unattributed_memory_bytes") == expected


def test_utilization_by_process(open_exporter: OpenExporter) -> None:
    """Processes that were idle, have no series or are gone have no utilization."""
    rows = [ProcessMemory(11, 300), ProcessMemory(12, 200), ProcessMemory(13, 1)]
    used = {
        11: ProcessUtilization(0.8, 0.4),
        13: ProcessUtilization(0.1, 0.1),
        99: ProcessUtilization(0.5, None),
    }
    gpu = fake_gpu(*rows, utilization=used)
    exposition = scrape_gpus(open_exporter, gpu, processes_per_gpu=2)

    assert exposition.by("pid", "nvml_process_utilization_ratio", engine="sm") == {"11": 0.8}
    assert exposition.by("pid", "nvml_process_utilization_ratio", engine="memory") == {"11": 0.4}


def test_process_on_several_gpus_is_shown_on_each(open_exporter: OpenExporter) -> None:
    """One pid with memory on two GPUs has a series and facts on each."""
    pid = os.getpid()
    exposition = scrape_gpus(
        open_exporter, fake_gpu(ProcessMemory(pid, 5)), fake_gpu(ProcessMemory(pid, 7), index=1)
    )

    assert exposition.by("gpu", MEMORY_OF, pid=str(pid)) == {"0": 5.0, "1": 7.0}
    assert set(exposition.by("gpu", INFO, pid=str(pid))) == {"0", "1"}


def facts(exposition: Exposition) -> dict[str, str]:
    """Return the facts of the process that runs the tests."""
    (labels,) = exposition.matching(INFO, pid=str(os.getpid()))
    return dict(labels)


def test_rank_and_run(open_exporter: OpenExporter, run_dir: Path) -> None:
    """A process that publishes samples has rank and run beside the kernel's facts."""
    publish(run_dir, own_sample())
    labels = facts(scrape_gpus(open_exporter, fake_gpu(ProcessMemory(os.getpid(), 5))))

    assert {"rank": "0", "run": "night", "uid": str(os.geteuid())}.items() <= labels.items()


def test_rank_of_an_earlier_process_is_not_exposed(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """A sample of an earlier process with the same pid is ignored."""
    publish(run_dir, own_sample(process=own_process(start_ticks=1)))
    labels = facts(scrape_gpus(open_exporter, fake_gpu(ProcessMemory(os.getpid(), 5))))

    assert {"rank", "run"}.isdisjoint(labels)


def test_command_line_is_not_exposed(open_exporter: OpenExporter) -> None:
    """Command lines can hold secrets: only declared facts are served."""
    allowed = {
        "gpu",
        "uuid",
        "pid",
        "name",
        "uid",
        "user",
        "container_id",
        "pod_uid",
        "slurm_job_id",
        "rank",
        "run",
    }

    assert (
        set(facts(scrape_gpus(open_exporter, fake_gpu(ProcessMemory(os.getpid(), 5))))) <= allowed
    )


def test_vanished_process_has_memory_but_no_facts(open_exporter: OpenExporter) -> None:
    """A process that NVML still lists has memory; its owner is unknown."""
    exposition = scrape_gpus(open_exporter, fake_gpu(ProcessMemory(1 << 22, 5)))

    assert exposition.by("pid", MEMORY_OF) == {str(1 << 22): 5.0}
    assert exposition.matching(INFO) == {}


OWNERS = {
    "container_id",
    "pod_uid",
    "slurm_job_id",
    "systemd_unit",
}  # of the process that runs the tests, where it has them


def test_facts_come_from_the_kernel(open_exporter: OpenExporter) -> None:
    """Name, user id and, if known, user name are exposed; the command line is not."""
    exposition = scrape_gpus(open_exporter, fake_gpu(ProcessMemory(os.getpid(), 5)))
    facts = [
        dict(labels) for labels in exposition.matching("nvml_process_info", pid=str(os.getpid()))
    ]

    assert [set(labels) - {"user", *OWNERS} for labels in facts] == [
        {"gpu", "uuid", "pid", "name", "uid"}
    ]
    assert str(os.getuid()) == facts[0]["uid"]
