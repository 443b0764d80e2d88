"""The join of NVML's and PyTorch's bytes: right, or absent."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.exposition import Exposition, scrape
from support.publishing import own_process, own_sample, publish
from support.samples import UUID

from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.processes import Processes, ProcessMemory
from torchmem.exporter.testing import FakeGpu, FakeNvml
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.sample import Sample

OpenExporter = Callable[..., Exporter]
GIB = 1 << 30
OUTSIDE = "torchmem_outside_allocator_bytes"
OWNERS = {
    "container_id",
    "pod_uid",
    "slurm_job_id",
}  # of the process that runs the tests, where it has them
OTHER = "GPU-ffffffff-0000-4000-8000-00000000000b"


def card(
    uuid: str = UUID,
    index: int = 0,
    *rows: ProcessMemory,
    is_listed: bool = True,
    error_code: int | None = None,
) -> FakeGpu:
    """Return an 80 GiB card with these processes, or without a process list."""
    memory = MemoryInfo(80 * GIB, 62 * GIB, 17 * GIB, GIB)
    processes = Processes(rows, memory=memory) if is_listed else None
    return FakeGpu(GpuIdentity(index, uuid), memory, processes, error_code=error_code)


def mine(used: int | None) -> ProcessMemory:
    """What NVML says about the process that runs the tests."""
    return ProcessMemory(os.getpid(), used)


def reserved(sample: Sample) -> int:
    """Reserved bytes of the sample's first device."""
    allocator = sample.devices[0].allocator
    assert allocator is not None
    return allocator.reserved_bytes.total


@pytest.fixture
def scrape_with(open_exporter: OpenExporter) -> Callable[..., Exposition]:
    """Scrape once with these cards."""
    return lambda *cards: scrape(open_exporter(FakeNvml.of(*cards)))


ScrapeWith = Callable[..., Exposition]


def test_difference_of_both_sides(run_dir: Path, scrape_with: ScrapeWith) -> None:
    """NVML's bytes of the process minus its reserved bytes, with the labels of the allocator's series."""
    sample = own_sample()
    publish(run_dir, sample)

    shown = scrape_with(card(UUID, 4, mine(reserved(sample) + 700 * 2**20)))

    assert 700.0 * 2**20 == shown.value(
        OUTSIDE, gpu="4", uuid=UUID, rank="0", pid=str(os.getpid()), run="night"
    )
    assert shown.series[OUTSIDE].keys() == shown.series["torchmem_reserved_peak_bytes"].keys()


def test_process_on_several_gpus_is_joined_on_each(run_dir: Path, scrape_with: ScrapeWith) -> None:
    """One pid on two GPUs has two remainders."""
    device = own_sample().devices[0]
    sample = own_sample(devices=(device, replace(device, index=1, uuid=OTHER)))
    publish(run_dir, sample)

    shown = scrape_with(
        card(UUID, 0, mine(reserved(sample) + 1)), card(OTHER, 1, mine(reserved(sample) + 2))
    )

    assert {UUID: 1.0, OTHER: 2.0} == shown.by("uuid", OUTSIDE)


@pytest.mark.parametrize(
    "cards",
    [
        [],
        [card()],
        [card(UUID, 0, mine(None))],
        [card(UUID, 0, ProcessMemory(1, 70 * GIB))],
        [card(OTHER, 0, mine(70 * GIB))],
        [card(is_listed=False)],
        [card(UUID, 0, mine(70 * GIB), error_code=15)],
        [card(UUID, 0, mine(1))],
    ],
    ids=[
        "no GPU",
        "process not listed",
        "bytes not permitted",
        "another process",
        "another GPU",
        "no process list",
        "lost GPU",
        "less than reserved",
    ],
)
def test_nothing_is_said_without_nvml(
    run_dir: Path, scrape_with: ScrapeWith, cards: list[FakeGpu]
) -> None:
    """When NVML does not give this process's bytes on this GPU, there is no remainder."""
    publish(run_dir, own_sample())

    shown = scrape_with(*cards)

    assert {} == shown.matching(OUTSIDE)
    assert 1.0 == shown.value("torchmem_process_state", state="running")


@pytest.mark.parametrize(
    "sample",
    [
        own_sample(process=own_process(start_ticks=None)),
        own_sample(process=own_process(start_ticks=1)),
        own_sample(process=own_process(pid_namespace=4026539999)),
        own_sample(ended="exited"),
        own_sample(devices=(replace(own_sample().devices[0], allocator=None),)),
        own_sample(devices=(replace(own_sample().devices[0], uuid=None),)),
    ],
    ids=[
        "start time unknown",
        "reused pid",
        "foreign namespace",
        "ended",
        "no allocator numbers",
        "no UUID",
    ],
)
def test_nothing_is_said_when_attribution_is_uncertain(
    run_dir: Path, scrape_with: ScrapeWith, sample: Sample
) -> None:
    """A pid alone is no proof that NVML and the sample mean the same process."""
    publish(run_dir, sample, f"x{SAMPLE_SUFFIX}")

    assert {} == scrape_with(card(UUID, 0, mine(70 * GIB))).matching(OUTSIDE)


def test_nothing_is_said_when_nvml_counts_pids_elsewhere(
    open_exporter: OpenExporter, run_dir: Path
) -> None:
    """An exporter in its own pid namespace must not take the host's pid 7 for its neighbour's pid 7."""

    publish(run_dir, own_sample())
    shown = scrape(open_exporter(FakeNvml(lambda: [card(UUID, 0, mine(70 * GIB))], namespace=1)))

    assert {} == shown.matching(OUTSIDE)
    assert {} == shown.matching("nvml_process_info")
    assert 1 == len(shown.matching("nvml_process_memory_bytes"))


def test_processes_are_named_by_the_kernel(scrape_with: ScrapeWith) -> None:
    """Short name, user id and, where it has one, the user's name; the command line is not shown."""
    shown = scrape_with(card(UUID, 0, mine(5)))
    facts = [dict(labels) for labels in shown.matching("nvml_process_info", pid=str(os.getpid()))]

    assert [{"gpu", "uuid", "pid", "name", "uid"}] == [
        set(found) - {"user", *OWNERS} for found in facts
    ]
    assert str(os.getuid()) == facts[0]["uid"]
