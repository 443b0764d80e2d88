"""The effect of each setting; test_golden.py tests their combinations."""

from __future__ import annotations

import pytest

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import MAX_RUN_LENGTH, Block, BlockOrder, BlockPool
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.stats import DeviceStats


def allocator(conf: str, gpu_bytes: int = GIB) -> DeviceCachingAllocator:
    """Return an allocator under these settings."""
    return DeviceCachingAllocator(
        SimulatedGpu(gpu_bytes, context_bytes=0), config=AllocatorConfig.parse(conf)
    )


def test_oversize_blocks_stay_whole() -> None:
    """From max_split_size on, a block is not split and serves only requests near its size."""
    oversize = allocator("max_split_size_mb:64")
    oversize.free(oversize.malloc(100 * MIB))
    small, far, near = (oversize.malloc(size * MIB) for size in (40, 79, 81))
    assert [block.size for block in (small, far, near)] == [40 * MIB, 80 * MIB, 100 * MIB]
    stats = oversize.memory_stats_as_nested_dict()
    counts = [stats[f"oversize_{kind}"]["current"] for kind in ("allocations", "segments")]
    assert (counts, stats["max_split_size"]) == ([2, 2], 64 * MIB)


def test_oversize_blocks_are_released_first() -> None:
    """Only as many oversize blocks are released as a request needs, without a retry."""
    oversize = allocator("max_split_size_mb:64", 300 * MIB)
    for block in [oversize.malloc(size * MIB) for size in (70, 80, 90, 30)]:
        oversize.free(block)
    oversize.malloc(120 * MIB)
    stats = oversize.memory_stats_as_nested_dict()
    assert tuple(
        stats[name] for name in ("num_alloc_retries", "num_device_free", "num_sync_all_streams")
    ) == (0, 2, 0)


def test_garbage_collection_releases_the_oldest() -> None:
    """Above the threshold, the cached segments unused for longest are released."""
    collecting = allocator(
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5", 400 * MIB
    )
    collecting.free(collecting.malloc(30 * MIB))
    collecting.malloc(62 * MIB)
    collecting.free(collecting.malloc(32 * MIB))
    collecting.malloc(70 * MIB)
    assert [segment["total_size"] // MIB for segment in collecting.memory_snapshot()] == [
        62,
        32,
        70,
    ]
    assert collecting.memory_stats_as_nested_dict()["num_alloc_retries"] == 0


def test_requests_may_be_rejected_before_the_driver_is_asked() -> None:
    """With throw_on_cudamalloc_oom, a request beyond the GPU is a rejection, not an OOM."""
    strict = allocator("throw_on_cudamalloc_oom:True", 100 * MIB)
    strict.free(strict.malloc(40 * MIB))
    with pytest.raises(
        OutOfMemoryError, match=r"preemptively rejected .* Requested size: 70\.00 MiB"
    ):
        strict.malloc(70 * MIB)
    stats = strict.memory_stats_as_nested_dict()
    assert tuple(
        stats[name] for name in ("num_oom_rejections", "num_ooms", "num_alloc_retries")
    ) == (1, 0, 0)


@pytest.mark.parametrize(("order", "taken"), [("segment", 0), ("address", 1), ("block", 0)])
def test_equal_blocks_are_taken_by_age_or_by_address(order: BlockOrder, taken: int) -> None:
    """PyTorch 2.13 takes the block of the oldest segment, up to 2.11 the lowest address."""

    class Descending(SimulatedGpu):
        next = 1 << 40

        def reserve_addresses(self, size: int) -> int:
            self.next -= size
            return self.next

    descending = DeviceCachingAllocator(Descending(GIB), order=order)
    blocks = [descending.malloc(30 * MIB) for _ in range(2)]
    for block in blocks:
        descending.free(block)
    assert descending.malloc(30 * MIB) is blocks[taken]


@pytest.mark.parametrize(("order", "taken"), [("segment", "head"), ("block", "tail")])
def test_the_tail_of_a_split_is_older_than_its_head(order: BlockOrder, taken: str) -> None:
    """In PyTorch 2.12 the head is a new `Block` object; since 2.13 only segments have an age."""
    split = DeviceCachingAllocator(SimulatedGpu(GIB), order=order)
    sizes = {"head": 4 * MIB, "between": 12 * MIB, "tail": 4 * MIB}
    blocks = {name: split.malloc(size) for name, size in sizes.items()}
    split.free(blocks["head"])
    split.free(blocks["tail"])
    assert split.malloc(4 * MIB).address == blocks[taken].address


def test_the_best_fit_is_found_among_many_blocks() -> None:
    """Free blocks stay in order if there are more of them than one run holds."""
    pool = BlockPool(is_small=True, device_stats=DeviceStats())
    count = 3 * MAX_RUN_LENGTH
    sizes = [512 * (1 + number * 7919 % count) for number in range(count)]
    for number, size in enumerate(sizes):
        pool.insert_into_blocks(Block(0, size, pool, number * GIB))
    assert sorted(sizes) == [block.size for block in pool]
    free = pool.of_stream(0)
    for size in sizes:
        block = free.pop_best_fit(size)
        assert block is not None
        assert size == block.size
    assert list(pool) == []
