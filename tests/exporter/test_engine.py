"""Engines in the exporter: the wake margin, exact unbacked bytes, and headroom beside neighbors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from exporter.test_outside_allocator import GIB, MIB, SharedGpu, device, h100, own_row, read_sample
from support.exposition import scrape
from support.publishing import own_process, publish
from support.samples import UUID, full_sample

from torchmem.demo.simulated_nvml import FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.headroom import bounded, taken_by_others
from torchmem.exporter.subjects.engine import engine_families
from torchmem.exporter.subjects.outside_allocator import ProcessUse
from torchmem.host.process_table import process_key
from torchmem.metrics.families import ProcessView, families
from torchmem.node.published import Published
from torchmem.sample.engine import Engine
from torchmem.sample.sample import DeviceSample, Layout

CACHE, WEIGHTS = 73_316 * MIB, 534 * MIB
ASLEEP = Engine("vllm", {}, {"kv_cache": CACHE, "weights": WEIGHTS})
LAYOUT = Layout(
    timestamp=0.0,
    segments=None,
    blocks=None,
    releasable_bytes=812 * MIB,
    stranded_bytes=0,
    largest_free_block_bytes=352 * MIB,
    free_block_counts=None,
    private_used_bytes=0,
    private_free_bytes=0,
    headroom_bytes=5782 * MIB,
    headroom_flush_bytes=6594 * MIB,
)


def server(read: DeviceSample) -> Published:
    """Return a live process with one device."""
    return Published(read_sample(read, process=own_process()), 7, "running", True)


def bounded_headroom(free: int, own: int, **changes: Any) -> tuple[int | None, int | None]:
    """Return the headroom of a server that read 5,782 MiB free and held 75,300 MiB in all."""
    read = device(driver_free_bytes=5782 * MIB, layout=LAYOUT, **changes)
    reserved = read.allocator.reserved_bytes.total if read.allocator else 0
    item = server(read)
    key = UUID, process_key(item.sample.process)
    use = ProcessUse(own, free, is_alone=False)
    [shown] = bounded([item], {(UUID, 7): use}, {key: 75_300 * MIB - reserved})
    layout = shown.sample.devices[0].layout
    assert layout is not None
    return layout.headroom_bytes, layout.headroom_flush_bytes


def test_what_a_neighbor_took_is_no_headroom() -> None:
    """It falls by what others took, but not below what a cached block serves."""
    neighbor = 5592 * MIB

    assert bounded_headroom(5782 * MIB - neighbor, 75_300 * MIB) == (352 * MIB, 1002 * MIB)


def test_its_own_memory_is_no_neighbors() -> None:
    """What the process has taken or returned itself, and a few MiB, change nothing."""
    known = 5782 * MIB, 6594 * MIB

    assert bounded_headroom(5782 * MIB, 75_300 * MIB) == known
    assert bounded_headroom(1782 * MIB, 79_300 * MIB) == known
    assert bounded_headroom(25_782 * MIB, 55_300 * MIB) == known
    assert bounded_headroom(5772 * MIB, 75_300 * MIB) == known


def test_an_engine_that_woke_up_unread_has_no_headroom_from_its_sleep() -> None:
    """What it read asleep is gone, as if others had taken it."""
    gpu = SharedGpu()
    gpu.scrape()
    gpu.unbacked = 40 * GIB
    gpu.read()
    layout = replace(LAYOUT, headroom_bytes=gpu.free, headroom_flush_bytes=gpu.free)
    gpu.sample = replace(gpu.sample, layout=layout)
    gpu.scrape()
    gpu.unbacked = 0
    gpu.scrape()

    item = server(gpu.sample)
    [known] = gpu.found.by_process.values()
    outside = {(UUID, process_key(item.sample.process)): known}
    use = ProcessUse(gpu.used, gpu.free, is_alone=True)
    [shown] = bounded([item], {(UUID, 7): use}, outside)
    after = shown.sample.devices[0].layout
    assert after is not None
    assert after.headroom_flush_bytes == gpu.free


def test_without_nvml_the_headroom_stays() -> None:
    """Unknown bytes bound nothing."""
    item = server(device(layout=LAYOUT))

    assert bounded([item], {}, {}) == [item]
    assert taken_by_others(device(allocator=None), ProcessUse(1, 1, is_alone=True), 0) is None
    assert taken_by_others(device(), ProcessUse(1, None, is_alone=True), 0) is None


def test_the_margin_is_of_this_scrape() -> None:
    """A neighbor of 60 GB leaves less than the engine takes; an awake engine has no margin."""

    def margins(engine: Engine | None, free: int) -> list[float]:
        use = ProcessUse(638 * MIB, free, is_alone=False)
        [family] = engine_families([server(device(engine=engine))], {(UUID, 7): use}, {})
        return [sample.value for sample in family.samples]

    assert margins(ASLEEP, 80_444 * MIB) == [6594 * MIB]
    assert margins(ASLEEP, 19_852 * MIB) == [-53_998 * MIB]
    assert margins(replace(ASLEEP, asleep={}), 80_444 * MIB) == []
    assert margins(None, 80_444 * MIB) == []


def test_what_the_engine_says_is_exact() -> None:
    """Its bytes are unbacked before the context is known, and while a neighbor hides the rest."""
    gpu = SharedGpu(unbacked=40 * GIB)
    engine = Engine("vllm", {}, {"kv_cache": 40 * GIB})
    gpu.sample = replace(gpu.sample, engine=engine)
    first = gpu.scrape()
    assert first["torchmem_reserved_unbacked_bytes"] == 40 * GIB
    assert first["torchmem_outside_allocator_bytes"] == gpu.context

    gpu.others, gpu.unbacked = 10 * GIB, 30 * GIB
    gpu.sample = replace(gpu.sample, engine=Engine("vllm", {}, {"kv_cache": 30 * GIB}))
    assert gpu.scrape()["torchmem_reserved_unbacked_bytes"] == 30 * GIB


def test_a_scrape_has_the_margin(run_dir: Path, open_exporter: Callable[..., Exporter]) -> None:
    """The exporter computes it from the file of the engine's process and from NVML."""
    publish(run_dir, read_sample(device(engine=ASLEEP)))
    gpu = h100(UUID, 0, own_row(638 * MIB), free=50 * GIB)
    page = scrape(open_exporter(FakeNvml.of(gpu)))

    shown = page.by("gpu", "torchmem_engine_wake_margin_bytes")
    assert shown == {"0": 50 * GIB - CACHE - WEIGHTS}


def test_series_exist_only_for_engines() -> None:
    """A process without an engine has none of its series."""
    sample = full_sample()
    without = replace(sample.devices[0], engine=None)
    item = Published(replace(sample, devices=(without,)), 7, "running", True)
    found = families([ProcessView(item.sample, 7, "running", {})])
    assert [f.name for f in found if f.samples and "engine" in f.name] == []
