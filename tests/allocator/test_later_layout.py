"""A snapshot beside statistics that were read later."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.fragmentation import Measurement, measurement
from torchmem.allocator.headroom import AvailableMemory, CachedFree, headroom
from torchmem.allocator.later_layout import MAX_SKEW_BYTES, is_outdated, layout_at
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIB
from torchmem.sample.sample import Allocator, ByPool, Layout
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.gpu import SimulatedGpu

sizes = st.lists(st.tuples(st.integers(1, 300 * MIB), st.booleans()), max_size=12)


class Process:
    """A process on a simulated GPU of 2 GiB."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.config = AllocatorConfig(expandable_segments=expandable)
        self.gpu = SimulatedGpu(2048 * MIB, context_bytes=0)
        self.allocator = DeviceCachingAllocator(self.gpu, 0, self.config)

    def run(self, requests: list[tuple[int, bool]]) -> None:
        """Allocate these sizes, as far as there is room, then free those that are not kept."""
        blocks = [
            (self.allocator.malloc(size), is_kept)
            for size, is_kept in requests
            if self.available.driver_free > size + 40 * MIB
        ]
        for block, is_kept in blocks:
            if not is_kept:
                self.allocator.free(block)

    @property
    def available(self) -> AvailableMemory:
        """What the driver has."""
        return AvailableMemory(self.gpu.mem_get_info()[0])

    def measured(self) -> Measurement:
        """Take a snapshot."""
        segments = self.allocator.memory_snapshot()
        return measurement(segments, 0, 0.0, self.available, self.config)

    def statistics(self) -> Allocator:
        """Read the statistics."""
        stats = self.allocator.stats
        allocated, active, reserved = (
            ByPool(None, None, stat.current)
            for stat in (stats.allocated_bytes, stats.active_bytes, stats.reserved_bytes)
        )
        return Allocator(allocated, active, reserved, None, None, 0, 0, 0)

    def layout(self, measured: Measurement) -> Layout:
        """Return what an earlier snapshot says now."""
        return layout_at(measured, self.statistics(), self.available)


def known(size: int | None) -> int:
    """Return a size that is not None."""
    assert size is not None
    return size


@given(sizes, st.booleans())
def test_after_a_release_the_free_bytes_are_those_that_are_left(
    requests: list[tuple[int, bool]], expandable: bool
) -> None:
    """As a new snapshot would count them; what depends on blocks is unknown until there is one."""
    process = Process(expandable=expandable)
    process.run(requests)
    measured = process.measured()
    process.allocator.empty_cache()
    layout, fresh = process.layout(measured), process.measured().layout

    outdated = measured.layout.releasable_bytes > MAX_SKEW_BYTES
    assert outdated is is_outdated(measured, process.statistics())
    if outdated:
        assert (0, fresh.stranded_bytes) == (layout.releasable_bytes, layout.stranded_bytes)
        assert [layout.fragmentation_ratio, layout.free_block_counts, layout.blocks] == [None] * 3
    driver = headroom(CachedFree(0, 0, 0), process.available, process.config, flush=False)
    assert driver <= known(layout.headroom_bytes) <= known(fresh.headroom_bytes)
    assert driver <= known(layout.headroom_flush_bytes) <= known(fresh.headroom_flush_bytes)


@given(sizes, st.integers(0, 1024), st.booleans())
def test_headroom_rises_with_what_the_driver_has(
    requests: list[tuple[int, bool]], others: int, expandable: bool
) -> None:
    """What another process gives back is headroom at the next read of the statistics."""
    process = Process(expandable=expandable)
    process.gpu.cuda_malloc(others * MIB)
    process.run(requests)
    measured = process.measured()
    given_back = replace(
        process.available, driver_free=process.available.driver_free + others * MIB
    )
    layout = layout_at(measured, process.statistics(), given_back)

    segments = process.allocator.memory_snapshot()
    fresh = measurement(segments, 0, 0.0, given_back, process.config).layout
    assert fresh == layout


def test_statistics_of_another_moment_leave_a_snapshot_as_it_is() -> None:
    """Memory that is allocated again, at the end of a step or later, is not a contradiction."""
    process = Process()
    process.run([(500 * MIB, False), (100 * MIB, True)])
    measured = process.measured()
    process.run([(400 * MIB, True), (600 * MIB, True)])

    layout = process.layout(measured)
    assert measured.layout == replace(
        layout,
        headroom_bytes=measured.layout.headroom_bytes,
        headroom_flush_bytes=measured.layout.headroom_flush_bytes,
    )
