"""Memory that is not a card's own: shared with the host, limited by software, or moved by Windows.

In every state the parts of a GPU add up to what NVML says that it has, or where NVML does not know,
to what CUDA says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.exposition import scrape
from support.fake_nvml import FakeNode
from support.publishing import own_sample, publish
from support.samples import UUID

from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.explain.parts import PartBytes
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.live.state import node_state
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.processes import Processes, ProcessMemory
from torchmem.node.state import GpuState, decode, encode
from torchmem.sample.sample import Allocator, ByPool, Counters, DeviceSample, FirstRead, Layout

OpenExporter = Callable[..., Exporter]
MIB, GIB = 1 << 20, 1 << 30
CARD = MemoryInfo(80 * GIB, 10 * GIB, 69 * GIB, GIB)
READ_AT = 1_700_000_000.0


def device(total: int, reserved: int, free: int | None, **changes: Any) -> DeviceSample:
    """Return a device of which PyTorch has reserved and uses some bytes."""
    pools = ByPool(0, reserved)
    return DeviceSample(
        0,
        changes.pop("uuid", UUID),
        "GPU",
        total,
        Allocator(pools, pools, pools, None, None, reserved, reserved, reserved),
        stats_timestamp=READ_AT,
        driver_free_bytes=free,
        **changes,
    )


def node(memory: MemoryInfo | None, *rows: ProcessMemory, listed: bool = True) -> FakeNvml:
    """Return NVML with one GPU and these processes."""
    free: dict[str | None, int] = {None: memory.free} if memory else {}
    processes = Processes(rows, memory=memory, free=free) if listed else None
    return FakeNvml.of(FakeGpu(GpuIdentity(0, UUID), memory, processes))


def own_row(used: int | None) -> ProcessMemory:
    """Return NVML's row of the process that runs the tests."""
    return ProcessMemory(os.getpid(), used)


def state_of(exporter: Exporter) -> GpuState:
    """Return the only GPU of the page's state, as a client reads it."""
    exporter.collect()
    (gpu,) = decode(encode(node_state(exporter.found()))).gpus
    return gpu


def sizes(parts: tuple[PartBytes, ...]) -> Mapping[str, int]:
    """Return the bytes of each part."""
    return {part.name: part.bytes for part in parts}


GB10 = "GPU-5d2c0b8f-e6a9-1b74-c38d-09f7a4e26b15"
SPARK = 127_600_748 << 10


@pytest.fixture
def spark(tmp_path: Path, run_dir: Path, open_exporter: OpenExporter) -> Exporter:
    """The exporter of a DGX Spark with one rank, whose host has 90 GiB available."""
    shared = device(SPARK, 20 * GIB, 90 * GIB, uuid=GB10, shares_host_memory=True)
    publish(run_dir, own_sample(devices=(shared,)))
    return open_exporter(FakeNode(tmp_path / "node", "gb10", os.getpid()).nvml())


def test_the_parts_of_a_gb10_add_up_to_what_cuda_says(spark: Exporter) -> None:
    """NVML reports no memory: what is available is free, the rest is the host's or PyTorch's."""
    gpu = state_of(spark)
    parts = sizes(gpu.parts)
    assert (gpu.total_bytes, sum(parts.values()), parts["free"]) == (SPARK, SPARK, 90 * GIB)
    assert "other_processes" not in parts


def test_a_gb10_has_its_processes_but_no_total(spark: Exporter) -> None:
    """No total is made up from the host's memory, and none from the name."""
    exposition = scrape(spark)
    assert exposition.value("nvml_unified_memory", gpu="0", uuid=GB10) == 1
    assert not [name for name in exposition.series if name.startswith("nvml_memory_")]
    assert exposition.series["nvml_process_memory_bytes"]
    assert "nvml_unattributed_memory_bytes" not in exposition.series
    assert "torchmem_driver_free_bytes" not in exposition.series
    assert exposition.series["torchmem_host_available_bytes"]


def test_a_carve_out_is_not_the_memory_of_an_n1x(
    run_dir: Path, open_exporter: OpenExporter
) -> None:
    """NVML says 8,128 MiB, and a process holds 30 GiB of the host's memory."""
    carved = MemoryInfo(8128 * MIB, 199 * MIB, 7929 * MIB, None)
    shared = device(45 * GIB, 30 * GIB, 12 * GIB, shares_host_memory=True)
    publish(run_dir, own_sample(devices=(shared,)))

    gpu = state_of(open_exporter(node(carved, own_row(None))))

    assert gpu.total_bytes == 45 * GIB == sum(sizes(gpu.parts).values())
    assert sizes(gpu.parts) == {"in_use": 30 * GIB, "not_pytorch": 3 * GIB, "free": 12 * GIB}


def limited(**changes: Any) -> DeviceSample:
    """Return the card of a pod of HAMi with 1,000 MiB."""
    left = 100 * MIB
    layout = Layout(READ_AT, None, None, 0, 0, 0, None, 0, 0, left, left)
    first = FirstRead(READ_AT - 60, 0, 800 * MIB)
    limit = device(1000 * MIB, 700 * MIB, left, layout=layout, first_read=first)
    return replace(limit, **changes)


def test_hami_makes_no_neighbor(run_dir: Path, open_exporter: OpenExporter) -> None:
    """The process sees 1,000 MiB of an 80 GiB card, which is almost empty."""
    used = 1300 * MIB
    memory = MemoryInfo(80 * GIB, used, 79 * GIB - used, GIB)
    publish(run_dir, own_sample(devices=(limited(),)))
    exporter = open_exporter(node(memory, own_row(used)))
    state_of(exporter)
    publish(run_dir, own_sample(devices=(limited(stats_timestamp=time.time()),)))

    gpu = state_of(exporter)  # the second scrape shows that nothing has changed

    assert sizes(gpu.parts) == {
        "in_use": 700 * MIB,
        "outside_allocator": 600 * MIB,
        "driver": GIB,
        "free": memory.free,
    }
    exposition = scrape(exporter)
    labels = {"gpu": "0", "uuid": UUID, "rank": "0", "pid": str(os.getpid()), "run": "night"}
    assert exposition.value("torchmem_outside_allocator_bytes", **labels) == 600 * MIB
    assert "torchmem_outside_allocator_start_bytes" not in exposition.series
    assert exposition.value("nvml_unattributed_memory_bytes", gpu="0", uuid=UUID) == 0


@pytest.mark.parametrize(
    ("card_free", "headroom"), [(60 * GIB, 100 * MIB), (40 * MIB, 40 * MIB), (0, 0)]
)
def test_headroom_is_by_the_limit_unless_the_card_has_less(
    run_dir: Path, open_exporter: OpenExporter, card_free: int, headroom: int
) -> None:
    """HAMi may promise more than there is: then the card decides."""
    memory = MemoryInfo(80 * GIB, 79 * GIB - card_free, card_free, GIB)
    publish(run_dir, own_sample(devices=(limited(),)))
    exporter = open_exporter(node(memory, own_row(1300 * MIB)))
    scrape(exporter)
    exposition = scrape(exporter)
    assert set(exposition.series["torchmem_headroom_bytes"].values()) == {headroom}


@pytest.fixture
def windows(tmp_path: Path) -> FakeNode:
    """An RTX 4090 under WSL, where NVML lists no process."""
    there = FakeNode(tmp_path / "node", "rtx_4090")
    there.change(
        "gpu 0",
        ComputeRunningProcesses="",
        GraphicsRunningProcesses="",
        SupportedEventTypes="not_supported",
    )
    return there


def test_what_windows_holds_is_not_without_an_owner(
    windows: FakeNode, open_exporter: OpenExporter
) -> None:
    """NVML lists no processes there, so the holders of the memory are unknown."""
    exposition = scrape(open_exporter(windows.nvml(is_wsl=True)))
    assert exposition.series["nvml_memory_used_bytes"]
    for name in ("nvml_processes", "nvml_unattributed_memory_bytes", "nvml_process_memory_bytes"):
        assert name not in exposition.series
    assert scrape(open_exporter(windows.nvml(is_wsl=False))).series["nvml_processes"]


def test_bytes_that_wsl_does_not_know_are_absent(
    windows: FakeNode, open_exporter: OpenExporter
) -> None:
    """2 to the 64 minus 1 means unknown: the process is listed, its memory is not."""
    windows.change("gpu 0", ComputeRunningProcesses=f"4242:{(1 << 64) - 1}")
    exposition = scrape(open_exporter(windows.nvml(is_wsl=True)))
    assert exposition.by("gpu", "nvml_processes") == {"0": 1.0}
    assert "nvml_process_memory_bytes" not in exposition.series
    assert "nvml_unattributed_memory_bytes" not in exposition.series


def test_what_windows_has_moved_to_the_host_is_not_on_the_card(
    run_dir: Path, open_exporter: OpenExporter
) -> None:
    """PyTorch has reserved 30 GiB on a card of 24: the rest is named, and the parts add up."""
    memory = MemoryInfo(24 * GIB, 23 * GIB, GIB // 2, GIB // 2)
    publish(run_dir, own_sample(devices=(device(24 * GIB, 30 * GIB, 0),)))
    exporter = open_exporter(node(memory, listed=False))

    gpu = state_of(exporter)

    assert sum(sizes(gpu.parts).values()) == 24 * GIB
    assert sizes(gpu.parts)["in_use"] == 47 * GIB // 2
    exposition = scrape(exporter)
    assert set(exposition.series["torchmem_reserved_unbacked_bytes"].values()) == {6 * GIB}


def test_bytes_above_the_cards_are_dropped_with_their_reason(
    windows: FakeNode, open_exporter: OpenExporter, caplog: pytest.LogCaptureFixture
) -> None:
    """One impossible number costs that number: the process and the others are still listed."""
    windows.change("gpu 0", ComputeRunningProcesses=f"4242:{1 << 60} 77:{GIB}")
    exposition = scrape(open_exporter(windows.nvml(is_wsl=False)))
    assert exposition.by("gpu", "nvml_processes") == {"0": 2.0}
    assert exposition.by("pid", "nvml_process_memory_bytes") == {"77": float(GIB)}
    assert f"usedGpuMemory: {1 << 60} bytes of process 4242" in caplog.text


def test_an_impossible_bar1_is_dropped_with_its_reason(
    windows: FakeNode, open_exporter: OpenExporter, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs that value alone."""
    windows.change("gpu 0", BAR1MemoryInfo=f"{GIB} 0 {2 * GIB}")
    exposition = scrape(open_exporter(windows.nvml(is_wsl=False)))
    assert "nvml_bar1_total_bytes" not in exposition.series
    assert exposition.series["nvml_memory_total_bytes"]
    assert f"{2 * GIB} bytes used of {GIB}" in caplog.text


def test_more_free_than_there_is_is_dropped_and_counted(
    run_dir: Path, open_exporter: OpenExporter
) -> None:
    """A sample of another SDK may say so: that number is left out, and the reason is counted."""
    memory = MemoryInfo(24 * GIB, 23 * GIB, GIB // 2, GIB // 2)
    publish(run_dir, own_sample(devices=(device(24 * GIB, 10 * GIB, 25 * GIB),)))
    exposition = scrape(open_exporter(node(memory, own_row(11 * GIB))))
    assert "torchmem_driver_free_bytes" not in exposition.series
    assert exposition.series["torchmem_reserved_bytes"]
    name = "torchmem_exporter_impossible_values_total"
    assert exposition.by("reason", name)["contradictory"] == 1


def test_managed_memory_is_of_its_process_and_no_neighbor(
    run_dir: Path, open_exporter: OpenExporter
) -> None:
    """A paged optimizer: the card is full, NVML says that the process is small, and it is alone."""
    memory = MemoryInfo(80 * GIB, 78 * GIB, GIB, GIB)
    paged = device(79 * GIB, 20 * GIB, GIB, managed_bytes=70 * GIB)
    publish(run_dir, own_sample(devices=(paged,)))

    exporter = open_exporter(node(memory, own_row(21 * GIB)))

    assert sizes(state_of(exporter).parts) == {
        "in_use": 20 * GIB,
        "outside_allocator": 58 * GIB,  # of which 57 are managed, and the rest is on the host
        "driver": GIB,
        "free": GIB,
    }
    exposition = scrape(exporter)
    assert set(exposition.series["torchmem_managed_bytes"].values()) == {70 * GIB}
    assert set(exposition.series["torchmem_outside_allocator_bytes"].values()) == {58 * GIB}
    assert exposition.value("nvml_unattributed_memory_bytes", gpu="0", uuid=UUID) == 57 * GIB


class Machine:
    """One GPU in any of the states above, and one rank on it."""

    def __init__(self, memory: MemoryInfo, rank: DeviceSample, used: int | None, *, listed: bool):
        self.memory, self.rank, self.used, self.listed = memory, rank, used, listed


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Draw a card, and a rank that may share, be limited, be moved, or say anything."""
    used, free, kept = draw(st.tuples(*[st.integers(0, 64 * GIB)] * 3))
    memory = MemoryInfo(used + free + kept, used, free, draw(st.sampled_from([kept, None])))
    if memory.reserved is None:
        memory = MemoryInfo(used + free, used, free, None)
    total = draw(st.sampled_from([memory.total, 1000 * MIB, 2 * memory.total, 1 << 49]))
    rank = device(
        total,
        draw(st.integers(0, 2 * total)),
        draw(st.none() | st.integers(0, total)),
        shares_host_memory=draw(st.booleans()),
        counters=Counters(device_allocs=draw(st.integers(0, 3))),
    )
    held = draw(st.none() | st.integers(0, memory.total))
    return Machine(memory, rank, held, listed=draw(st.booleans()))


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(machines(), min_size=1, max_size=3))
def test_the_parts_always_add_up(
    run_dir: Path, open_exporter: OpenExporter, course: list[Machine]
) -> None:
    """To NVML's total, or to CUDA's where the memory is the host's, whatever happens in between."""
    for machine in course:
        rows = [] if machine.used is None else [own_row(machine.used)]
        publish(run_dir, own_sample(devices=(machine.rank,)))
        exporter = open_exporter(node(machine.memory, *rows, listed=machine.listed))
        for _ in range(2):
            gpu = state_of(exporter)
            expected = machine.memory.total
            if machine.rank.shares_host_memory:
                expected = machine.rank.total_bytes or 0
            parts = sizes(gpu.parts)
            assert gpu.total_bytes == expected
            known = machine.rank.driver_free_bytes is not None
            if not machine.rank.shares_host_memory or known:
                assert sum(parts.values()) == expected
            else:
                assert sum(parts.values()) <= expected
            assert all(size > 0 for size in parts.values())


def test_an_unknown_free_leaves_the_parts_of_the_rank(
    run_dir: Path, open_exporter: OpenExporter
) -> None:
    """Where nobody knows what is free, only what ranks hold is told."""
    shared = device(SPARK, 20 * GIB, None, shares_host_memory=True)
    publish(run_dir, own_sample(devices=(replace(shared, driver_free_bytes=None),)))
    gpu = state_of(open_exporter(node(None, listed=False)))
    assert sizes(gpu.parts) == {"in_use": 20 * GIB}
