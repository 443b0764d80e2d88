"""Expandable segments: one range that grows page by page and releases free pages."""

from __future__ import annotations

import pytest

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu

EXPANDABLE = AllocatorConfig(expandable_segments=True)


@pytest.fixture
def expandable(gpu: SimulatedGpu) -> DeviceCachingAllocator:
    """Return an allocator with expandable segments on the GPU of 100 MiB."""
    return DeviceCachingAllocator(gpu, config=EXPANDABLE)


def reserved(allocator: DeviceCachingAllocator) -> int:
    """Return the reserved MiB."""
    return int(allocator.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"]) // MIB


def layout(allocator: DeviceCachingAllocator) -> list[list[tuple[int, str]]]:
    """Return size in MiB and state of each block, by contiguous range."""
    segments = allocator.memory_snapshot()
    assert all(segment["is_expandable"] for segment in segments)
    return [
        [(block["size"] // MIB, block["state"][:4]) for block in segment["blocks"]]
        for segment in segments
    ]


def test_requests_follow_one_another_in_one_range(expandable: DeviceCachingAllocator) -> None:
    """Pages of 20 MiB are mapped as needed; the free end of the last one is used first."""
    blocks = [expandable.malloc(size * MIB) for size in (15, 15, 35)]
    assert layout(expandable) == [[(15, "acti"), (15, "acti"), (35, "acti"), (15, "inac")]]
    assert [block.address - blocks[0].address for block in blocks] == [0, 15 * MIB, 30 * MIB]
    stats = expandable.memory_stats_as_nested_dict()
    assert stats["num_device_alloc"] == 3
    assert stats["segment"]["all"]["current"] == 0
    assert stats["inactive_split"]["all"]["current"] == 0


def test_only_entirely_free_pages_are_released(expandable: DeviceCachingAllocator) -> None:
    """Of a hole of 55 MiB, the pages inside are released; its ends stay free blocks."""
    expandable.malloc(15 * MIB)
    hole = expandable.malloc(55 * MIB)
    expandable.malloc(5 * MIB)
    expandable.free(hole)
    assert reserved(expandable) == 80
    expandable.empty_cache()
    assert layout(expandable) == [
        [(15, "acti"), (5, "inac")],
        [(10, "inac"), (5, "acti"), (5, "inac")],
    ]
    assert reserved(expandable) == 40


def test_a_gap_is_filled_before_the_end_grows(expandable: DeviceCachingAllocator) -> None:
    """Released pages are mapped again for the next request that fits there."""
    test_only_entirely_free_pages_are_released(expandable)
    start = expandable.memory_snapshot()[0]["address"]
    assert expandable.malloc(50 * MIB).address - start == 15 * MIB
    assert layout(expandable) == [
        [(15, "acti"), (50, "acti"), (5, "inac"), (5, "acti"), (5, "inac")]
    ]


def test_an_empty_range_disappears(expandable: DeviceCachingAllocator, gpu: SimulatedGpu) -> None:
    """When every page was released, nothing is left and all memory is free."""
    expandable.free(expandable.malloc(70 * MIB))
    expandable.empty_cache()
    assert layout(expandable) == []
    assert gpu.mem_get_info() == (100 * MIB, 100 * MIB)


def test_pages_mapped_before_a_failure_stay(gpu: SimulatedGpu) -> None:
    """If the driver has pages for only one of two gaps, those stay mapped and free."""
    allocator = DeviceCachingAllocator(gpu, config=EXPANDABLE)
    first, pin, second, other = (allocator.malloc(20 * MIB) for _ in range(4))
    allocator.free(first)
    allocator.free(second)
    allocator.empty_cache()
    allocator.malloc(30 * MIB, stream=1)
    allocator.free(pin)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(60 * MIB)
    assert other.allocated
    assert reserved(allocator) == 60
    assert allocator.memory_stats_as_nested_dict()["num_alloc_retries"] + 1 == 2


def test_a_block_that_waits_does_not_grow(
    expandable: DeviceCachingAllocator, gpu: SimulatedGpu
) -> None:
    """A freed block at the end of the range is not used while another stream uses it."""
    block = expandable.malloc(20 * MIB)
    expandable.record_stream(block, 1)
    gpu.hold_events(True)
    expandable.free(block)
    assert block.address + 20 * MIB == expandable.malloc(30 * MIB).address


def test_small_pages_have_2_mib(expandable: DeviceCachingAllocator) -> None:
    """The small pool has its own range, which grows by 2 MiB."""
    for _ in range(3):
        expandable.malloc(MIB)
    assert reserved(expandable) == 4
    assert layout(expandable) == [[(1, "acti"), (1, "acti"), (1, "acti"), (1, "inac")]]


def test_free_blocks_are_skipped_after_the_setting_was_switched_off() -> None:
    """Without the setting, a request gets new memory, not a free block of an expandable segment."""
    recorded = DeviceCachingAllocator(
        SimulatedGpu(), config=AllocatorConfig(expandable_segments=True)
    )
    recorded.free(recorded.malloc(20 * MIB))
    switched = DeviceCachingAllocator(SimulatedGpu())
    switched.restore(recorded.memory_snapshot())
    block = switched.malloc(20 * MIB)
    assert block.expandable_segment is None
    assert switched.stats.num_device_alloc == 1
