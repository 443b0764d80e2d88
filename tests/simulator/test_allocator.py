"""What the allocator decides: which block it takes, when it splits, retries and fails."""

from __future__ import annotations

import pickle

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu


def layout(segments: list[SegmentInfo]) -> list[list[tuple[int, str]]]:
    """Return size in MiB and state of each block, by segment."""
    return [
        [(block["size"] // MIB, block["state"][:4]) for block in segment["blocks"]]
        for segment in segments
    ]


def test_a_request_takes_the_head_of_a_block(allocator: DeviceCachingAllocator) -> None:
    """3 MiB come from the head of a new 20 MiB segment, and 17 MiB stay free."""
    block = allocator.malloc(3 * MIB)
    (segment,) = allocator.memory_snapshot()
    assert layout([segment]) == [[(3, "acti"), (17, "inac")]]
    assert block.address == segment["address"]


def test_up_to_1_mib_is_not_split_off_a_large_block(allocator: DeviceCachingAllocator) -> None:
    """A remainder of 1 MiB stays with the block; one of 512 bytes more becomes a free block."""
    allocator.free(allocator.malloc(16 * MIB))
    kept = allocator.malloc(15 * MIB)
    assert kept.size == 16 * MIB
    allocator.free(kept)
    assert allocator.malloc(15 * MIB - 512).size == 15 * MIB - 512


def test_small_blocks_are_split_to_the_last_512_bytes(allocator: DeviceCachingAllocator) -> None:
    """4,096 requests of up to 512 bytes share one 2 MiB segment."""
    blocks = [allocator.malloc(1) for _ in range(4096)]
    assert len(allocator.memory_snapshot()) == 1
    assert blocks[-1].address - blocks[0].address == 4095 * 512


def test_best_fit_takes_the_smallest_then_the_lowest(allocator: DeviceCachingAllocator) -> None:
    """The smallest free block that fits is taken; among equals, the one at the lowest address."""
    blocks = [allocator.malloc(size * MIB) for size in (20, 14, 14, 16)]
    addresses = [block.address for block in blocks]
    for block in reversed(blocks):
        allocator.free(block)
    taken = [allocator.malloc(size * MIB).address for size in (14, 14, 15, 17)]
    assert [addresses[1], addresses[2], addresses[3], addresses[0]] == taken


def test_free_neighbors_become_one_block(allocator: DeviceCachingAllocator) -> None:
    """A block freed between two free ones merges with both."""
    first, middle, last = (allocator.malloc(4 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(last)
    assert layout(allocator.memory_snapshot()) == [[(4, "inac"), (4, "acti"), (12, "inac")]]
    allocator.free(middle)
    assert layout(allocator.memory_snapshot()) == [[(20, "inac")]]


def test_streams_do_not_share_blocks(allocator: DeviceCachingAllocator) -> None:
    """Memory freed on one stream is not given to another."""
    block = allocator.malloc(20 * MIB, stream=7)
    allocator.free(block)
    assert allocator.malloc(20 * MIB).address != block.address
    assert allocator.malloc(20 * MIB, stream=7).address == block.address


def test_a_retry_releases_cached_segments_first(
    allocator: DeviceCachingAllocator, gpu: SimulatedGpu
) -> None:
    """If the driver refuses, whole free segments are released and the driver is asked again."""
    pinned = allocator.malloc(40 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    assert gpu.mem_get_info()[0] == 0
    allocator.malloc(50 * MIB, stream=1)
    stats = allocator.memory_stats_as_nested_dict()
    assert [
        stats[name]
        for name in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_free")
    ] == [1, 0, 1, 1]
    assert stats["reserved_bytes"]["all"]["current"] == 90 * MIB
    assert pinned.allocated


def test_fragmentation_ends_in_an_oom_with_memory_to_spare(
    allocator: DeviceCachingAllocator,
) -> None:
    """Five pinned segments have 75 MiB of free memory, but a request of 16 MiB fails."""
    for block in [allocator.malloc(20 * MIB) for _ in range(5)]:
        allocator.free(block)
    for large, _ in [(allocator.malloc(15 * MIB), allocator.malloc(5 * MIB)) for _ in range(5)]:
        allocator.free(large)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(16 * MIB)
    details = caught.value.details
    sizes = details.requested, details.free, details.allocated, details.unallocated
    assert sizes == (16 * MIB, 0, 25 * MIB, 75 * MIB)
    stats = allocator.memory_stats_as_nested_dict()
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 1)


def test_the_error_has_the_text_of_pytorch(allocator: DeviceCachingAllocator) -> None:
    """The text has the requested segment, the GPU, and the free and unallocated bytes."""
    allocator.malloc(84 * MIB)
    small = allocator.malloc(MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(3 * MIB)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 100.00 MiB "
        "of which 14.00 MiB is free. Including non-PyTorch memory, this process has 86.00 MiB "
        "memory in use. Of the allocated memory 85.00 MiB is allocated by PyTorch, and 1024.00 KiB "
        "is reserved by PyTorch but unallocated."
    )
    assert small.allocated


def test_the_error_can_be_pickled(allocator: DeviceCachingAllocator) -> None:
    """A pickled error keeps its text and its numbers."""
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(200 * MIB)
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 -- our own bytes
    assert (str(caught.value), caught.value.details) == (str(copy), copy.details)


def test_success_is_not_monotone_in_size(allocator: DeviceCachingAllocator) -> None:
    """With 12 MiB left, 12 MiB and 1 MiB succeed, but not 2 MiB, which need a 20 MiB segment."""
    allocator.malloc(88 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2 * MIB)
    allocator.free(allocator.malloc(12 * MIB))
    assert allocator.malloc(MIB).allocated


def test_observers_see_the_released_state(allocator: DeviceCachingAllocator) -> None:
    """An observer gets device, segment, total and free bytes after the cache was released."""
    seen: list[tuple[int, ...]] = []

    def observe(device: int, alloc_size: int, total: int, free: int) -> None:
        stats = allocator.memory_stats_as_nested_dict()
        seen.append(
            (device, alloc_size, total, free, stats["num_ooms"], len(allocator.memory_snapshot()))
        )

    allocator.attach_out_of_memory_observer(observe)
    allocator.malloc(40 * MIB)
    allocator.free(allocator.malloc(50 * MIB))
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(61 * MIB)
    assert seen == [(0, 62 * MIB, 100 * MIB, 60 * MIB, 1, 1)]


def test_the_memory_fraction_limits_what_is_reserved(allocator: DeviceCachingAllocator) -> None:
    """At the limit, the cache is released, the driver is not asked, and observers see it."""
    seen: list[tuple[int, ...]] = []
    allocator.attach_out_of_memory_observer(lambda *args: seen.append(args))
    allocator.set_memory_fraction(0.5)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(50 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"50\.00 MiB allowed; "):
        allocator.malloc(12 * MIB)
    assert seen == [(0, 12 * MIB, 50 * MIB, 50 * MIB)]
    allocator.set_memory_fraction(1.0)
    assert allocator.malloc(12 * MIB).allocated


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_fraction_outside_0_to_1_is_rejected(
    allocator: DeviceCachingAllocator, fraction: float
) -> None:
    """A memory fraction is from 0 to 1."""
    with pytest.raises(ValueError, match=r"Allowed range: 0~1"):
        allocator.set_memory_fraction(fraction)


def test_a_block_is_freed_once(allocator: DeviceCachingAllocator) -> None:
    """Freeing a block again is an error and changes nothing."""
    block = allocator.malloc(MIB)
    allocator.free(block)
    before = allocator.memory_stats_as_nested_dict()
    with pytest.raises(ValueError, match="is not allocated"):
        allocator.free(block)
    assert before == allocator.memory_stats_as_nested_dict()
