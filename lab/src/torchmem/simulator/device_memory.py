"""Where memory comes from when no free block fits, and what goes back to the driver.

This includes the retry after a failed allocation, `empty_cache()` and the garbage collection
(`DeviceCachingAllocator::garbage_collect_cached_blocks`). Names follow
c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, repeat

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import DEFAULT_POOL, PoolId
from torchmem.simulator.blocks import (
    AllocParams,
    Block,
    BlockOrder,
    BlockPool,
    get_free_block,
)
from torchmem.simulator.errors import OutOfMemoryDetails, OutOfMemoryError
from torchmem.simulator.events import OutstandingEvents
from torchmem.simulator.expandable_segments import ExpandableSegments
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.private_pools import PrivatePools
from torchmem.simulator.stats import DeviceStats


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """Allocates the segments of one device from its driver and gives free ones back.

    Blocks of `max_split_size` bytes or more are oversize. `counter` numbers the segments.
    """

    gpu: SimulatedGpu
    stats: DeviceStats
    expandable_segments: ExpandableSegments
    max_split_size: int | None
    counter: Iterator[int]

    def cuda_malloc(self, params: AllocParams) -> Block | None:
        """Return a new segment as one block, in no pool yet, or None if the driver refuses."""
        size, pool = params.alloc_size, params.pool
        address = self.gpu.cuda_malloc(size)
        if address is None:
            return None
        self.stats.num_device_alloc += 1
        self._count_segment(pool, size)
        return Block(params.stream, size, pool, address, registration_counter=next(self.counter))

    def adopt(self, blocks: list[Block], numbers: Mapping[int, int]) -> None:
        """Count linked blocks as a segment that the driver gave before.

        `numbers` are registration counters by address; what is not among them gets the next one.
        """
        size, pool = sum(block.size for block in blocks), blocks[0].pool
        self.gpu.adopt(blocks[0].address, size)
        self._count_segment(pool, size)
        for block in blocks:
            if block.prev is None or pool.numbers is not None:
                number = numbers.get(block.address) or next(self.counter)
            block.registration_counter = number

    def release_block(self, block: Block) -> None:
        """Free a block that is a whole segment with cudaFree."""
        pool = block.pool
        self.gpu.cuda_free(block.address)
        self.stats.num_device_free += 1
        pool.stats.segment.current -= 1
        pool.subtract_reserved(block.size)
        if self._is_oversize(block.size):
            self.stats.oversize_segments.current -= 1
        pool.erase(block)

    def release_blocks(self, pool: BlockPool) -> None:
        """Give back the free segments of a pool, and the free pages of its expandable segments."""
        for block in list(pool):
            if block.expandable_segment is not None:
                self.expandable_segments.unmap_block(block)
            elif not block.is_split():
                self.release_block(block)

    def releasable_bytes(self, pool: BlockPool) -> int:
        """Return the free bytes of a pool that `release_blocks` would give back."""
        return sum(_releasable(block) for block in pool)

    def release_available_cached_blocks(self, params: AllocParams) -> bool:
        """Give back oversize blocks of the request's stream until the new segment may fit.

        Return False if there are too few of them.
        """
        if self.max_split_size is None:
            return False
        needed = max(params.size, self.max_split_size)
        free = params.pool.of_stream(params.stream)
        # Blocks of expandable segments do not count since PyTorch 2.5 (pytorch/pytorch#134338).
        # Any other free oversize block is a whole segment, except in a damaged recording, where the
        # driver must not take back what is in use.
        fitting = next(free.at_least(needed), None)
        if fitting is not None and not fitting.is_split():
            self.release_block(fitting)
            return True
        oversize = [block for block in free.at_least(self.max_split_size) if block.size < needed]
        released = 0
        for block in reversed(oversize):
            if released >= needed:
                break
            if not block.is_split():
                released += block.size
                self.release_block(block)
        # As in PyTorch, what was given back in vain is not taken again.
        return released >= needed

    def _count_segment(self, pool: BlockPool, size: int) -> None:
        pool.stats.segment.increase(1)
        pool.add_reserved(size)
        if self._is_oversize(size):
            self.stats.oversize_segments.increase(1)

    def _is_oversize(self, size: int) -> bool:
        return self.max_split_size is not None and size >= self.max_split_size


def _releasable(block: Block) -> int:
    if block.expandable_segment is not None:
        return block.size - block.expandable_segment.page_parts(block.address, block.size)
    return 0 if block.is_split() else block.size


def garbage_collect_cached_blocks(
    large_blocks: BlockPool, target_size: int, cached: CachedBlocks
) -> None:
    """Give back at least `target_size` bytes of free segments of the large pool, the oldest first.

    The age of a block is the number of searches in its pool since it was freed. Each round gives
    back every block that reaches the mean age of the remaining ones.
    """
    # This leaves out expandable segments: as their range is larger than the GPU's memory, a block
    # without memory always follows.
    freeable = [block for block in large_blocks if not block.is_split()]
    reclaimed = 0
    while reclaimed < target_size and freeable:
        mean_age = sum(_age(block) for block in freeable) / len(freeable)
        old = [block for block in freeable if _age(block) >= mean_age]
        freeable = [block for block in freeable if _age(block) < mean_age]
        for block in old:
            reclaimed += block.size
            cached.release_block(block)


def _age(block: Block) -> int:
    return block.pool.get_free_blocks_call_count - block.gc_count_base


class DevicePools:
    """The pools of one device and its driver.

    `counter` numbers the segments, or all blocks if their order is "block".
    """

    def __init__(
        self,
        gpu: SimulatedGpu,
        device: int,
        config: AllocatorConfig,
        stats: DeviceStats,
        order: BlockOrder,
    ) -> None:
        self.gpu = gpu
        self.device = device
        self.config = config
        self.stats = stats
        self.order = order
        self.allowed_memory_maximum: int | None = None
        # With equal numbers, only the address decides between blocks of equal size.
        self.counter = counter = repeat(0) if order == "address" else count(1)
        numbers = counter if order == "block" else None
        self.small_blocks = BlockPool(is_small=True, device_stats=stats, numbers=numbers)
        self.large_blocks = BlockPool(is_small=False, device_stats=stats, numbers=numbers)
        self.private_pools = PrivatePools(stats, numbers)
        self.expandable_segments = ExpandableSegments(
            gpu, stats, config.large_segment_size, counter
        )
        self.cached = CachedBlocks(
            gpu, stats, self.expandable_segments, config.max_split_size, counter
        )

    def free_blocks(self) -> Iterator[Block]:
        """Iterate over all free blocks."""
        yield from self.small_blocks
        yield from self.large_blocks
        yield from self.private_pools.free_blocks()

    def releasable_bytes(self) -> int:
        """Return the free bytes of the default pools that can go back to the driver."""
        return sum(map(self.cached.releasable_bytes, (self.small_blocks, self.large_blocks)))

    @property
    def collects_garbage(self) -> bool:
        """Whether the garbage collection runs; it needs a memory limit."""
        return (
            self.allowed_memory_maximum is not None and self.config.garbage_collection_threshold > 0
        )

    def get_free_block(self, params: AllocParams) -> Block | None:
        """Remove and return the free block for a request, by all rules of the settings."""
        if self.collects_garbage:
            params.pool.get_free_blocks_call_count += 1
        return get_free_block(params, self.config)

    def get_new_block(self, params: AllocParams, events: OutstandingEvents) -> Block | None:
        """Return a new segment or a free block of an overflow pool, or None if memory is exhausted.

        Raises:
            OutOfMemoryError: `throw_on_cudamalloc_oom` rejects the request.
        """
        if self.allowed_memory_maximum is not None and self.collects_garbage:
            self._garbage_collect(self.allowed_memory_maximum)
        # Since PyTorch 2.11, `use_on_oom` pools come before all that gives memory back; in 2.8 to
        # 2.10 they came last.
        block = self._alloc_block(params) or self._try_mempool_fallback(params)
        if block is None and self.cached.release_available_cached_blocks(params):
            block = self._alloc_block(params)
        if block is None:
            self.release_cached_blocks(DEFAULT_POOL, events)
            # Like PyTorch, ask only the driver here; do not search the pool again.
            self.stats.num_alloc_retries += 1
            block = self._alloc_block(params)
        return block

    def release_cached_blocks(self, pool_id: PoolId, events: OutstandingEvents) -> None:
        """Give back the cache of one private pool without users.

        For `DEFAULT_POOL`, give back that of the default pools and of all such private pools.
        """
        if pool_id == DEFAULT_POOL:
            self.stats.num_sync_all_streams += 1
            events.synchronize_and_free_events()
            self.cached.release_blocks(self.large_blocks)
            self.cached.release_blocks(self.small_blocks)
        for pool in self.private_pools.unused(pool_id):
            if pool_id != DEFAULT_POOL:
                self.stats.num_sync_all_streams += 1
                events.synchronize_and_free_events(pool)
            self.cached.release_blocks(pool.small_blocks)
            self.cached.release_blocks(pool.large_blocks)
            self.private_pools.forget_if_empty(pool)

    def oom_details(self, requested: int, *, rejected: bool = False) -> OutOfMemoryDetails:
        """Return the state of the memory for an OutOfMemoryError."""
        free, total = self.gpu.mem_get_info()
        private = sum(block.size for block in self.private_pools.free_blocks())
        allocated = self.stats.allocated_bytes.current + private
        return OutOfMemoryDetails(
            device=self.device,
            requested=requested,
            total=total,
            free=free,
            process=self.gpu.use.own(),
            allowed=self.allowed_memory_maximum,
            allocated=allocated,
            unallocated=self.stats.reserved_bytes.current - allocated,
            private=private,
            rejected=rejected,
        )

    def _garbage_collect(self, allowed: int) -> None:
        threshold = int(self.config.garbage_collection_threshold * allowed)
        excess = self.stats.reserved_bytes.current - threshold
        if excess > 0:
            garbage_collect_cached_blocks(self.large_blocks, excess, self.cached)

    def _alloc_block(self, params: AllocParams) -> Block | None:
        # PyTorch checks the limits with a whole segment, also where an expandable segment would
        # need only a few pages more.
        config, total = self.config, self.stats.reserved_bytes.current + params.alloc_size
        if self.allowed_memory_maximum is not None and total > self.allowed_memory_maximum:
            return None
        if config.throw_on_cudamalloc_oom and total > int(
            config.per_process_memory_fraction * self.gpu.total_bytes
        ):
            self.stats.num_oom_rejections += 1
            raise OutOfMemoryError(self.oom_details(params.orig_size, rejected=True))
        if params.is_expandable_segments_active:
            return self.expandable_segments.try_allocate_expandable_block(params)
        return self.cached.cuda_malloc(params)

    def _try_mempool_fallback(self, params: AllocParams) -> Block | None:
        if params.pool.owner is not None:
            return None
        for pool in self.private_pools.use_on_oom():
            blocks = pool.blocks(params.size)
            block = self.get_free_block(
                replace(params, pool=blocks, is_expandable_segments_active=False)
            )
            if block is not None:
                return block
        return None
