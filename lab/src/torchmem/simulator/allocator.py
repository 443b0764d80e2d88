"""The CUDA caching allocator of one device.

Methods have the names and the behavior of `DeviceCachingAllocator` in
c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13. Not simulated: CUDA graph capture, pools with an
allocator of their own, settings that change at run time, peer access, callbacks that free memory,
and a driver that needs or keeps more memory than it was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import RLock
from types import MappingProxyType
from typing import Any

from torchmem.allocator.backend import OomObserver
from torchmem.allocator.settings import DEFAULT_CONFIG, AllocatorConfig
from torchmem.allocator.sizes import SMALL_SIZE, round_size
from torchmem.allocator.snapshot import DEFAULT_POOL, PoolId, SegmentInfo
from torchmem.simulator.blocks import (
    UNLIMITED,
    AllocParams,
    Block,
    BlockOrder,
    BlockPool,
    should_split,
    split_head,
    try_merge_blocks,
)
from torchmem.simulator.device_memory import DevicePools
from torchmem.simulator.errors import OutOfMemoryDetails, OutOfMemoryError
from torchmem.simulator.events import OutstandingEvents
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.private_pools import StreamFilter
from torchmem.simulator.snapshot import RangeKey, restore_blocks, segment_infos
from torchmem.simulator.stats import UNLIMITED_SPLIT_SIZE, DeviceStats


class DeviceCachingAllocator:
    """Allocates blocks of cached segments on one simulated GPU; safe to read from other threads.

    `order` is the order of free blocks of equal size, by default that of PyTorch 2.13 and newer.
    """

    def __init__(
        self,
        gpu: SimulatedGpu,
        device: int = 0,
        config: AllocatorConfig = DEFAULT_CONFIG,
        *,
        order: BlockOrder = "segment",
    ) -> None:
        self.gpu = gpu
        self.device = device
        self.config = config
        self.current_stream = 0
        self._mutex = RLock()
        self._stats = DeviceStats(max_split_size=config.max_split_size or UNLIMITED_SPLIT_SIZE)
        self._max_split_size = config.max_split_size or UNLIMITED
        self._memory = DevicePools(gpu, device, config, self._stats, order)
        self._small_blocks = self._memory.small_blocks
        self._large_blocks = self._memory.large_blocks
        self._private_pools = self._memory.private_pools
        self._events = OutstandingEvents(gpu, self.free_block)
        self._cuda_events = self._events.cuda_events
        self.active_blocks: set[Block] = set()
        self._oom_observers: list[OomObserver] = []
        self._round_size = config.round_size if any(config.roundup_power2_divisions) else round_size
        self.set_memory_fraction(config.per_process_memory_fraction)

    @property
    def stats(self) -> DeviceStats:
        """The live statistics."""
        return self._stats

    @property
    def allowed_memory_maximum(self) -> int | None:
        """The limit on reserved bytes, or None without a limit."""
        return self._memory.allowed_memory_maximum

    def malloc(self, orig_size: int, stream: int = 0) -> Block:
        """Allocate a block of at least `orig_size` bytes for `stream`.

        Raises:
            OutOfMemoryError: no free block fits, and the driver has no memory, even after the cache
                was released.
        """
        with self._mutex:
            self.current_stream = stream
            # As in PyTorch, a block that waited for a stream becomes free at the next request.
            if self._cuda_events:
                self._events.process_events()
            size = self._round_size(orig_size)
            pool = self.get_pool(size, stream)
            block = pool.of_stream(stream).pop_best_fit(size) if self.takes_best_fit else None
            if block is None:
                block = self._search_or_allocate(orig_size, size, pool, stream)
            if block is not None:
                # A block of another pool comes from a `use_on_oom` pool, which is searched with the
                # setting off.
                is_expandable = self.config.expandable_segments and block.pool is pool
                return self._alloc_found_block(
                    block,
                    size,
                    orig_size,
                    split=should_split(block, size, is_expandable, self._max_split_size),
                )
            self._stats.num_ooms += 1
            details = self._memory.oom_details(self.config.get_allocation_size(size))
        # Without the mutex, as in PyTorch: observers ask the allocator for its state.
        self._notify_oom_observers(details)
        raise OutOfMemoryError(details)

    def free(self, block: Block) -> None:
        """Free a block that `malloc` returned.

        A block that other streams used becomes free only after they have finished with it.

        Raises:
            ValueError: the block is not allocated.
        """
        with self._mutex:
            if not block.allocated:
                raise ValueError(f"invalid device pointer: {block.address:#x} is not allocated")
            block.allocated = False
            block.pool.stats.block_returned(block.size)
            if block.size >= self._max_split_size:
                self._stats.oversize_allocations.current -= 1
            if block.stream_uses:
                self._events.insert_events(block)
            else:
                self.free_block(block)

    def free_block(self, block: Block) -> None:
        """Merge a block that no stream uses any longer with its neighbors, and cache it.

        `free` and the completion of events call this; users of the allocator call `free`.
        """
        self.active_blocks.remove(block)
        size = block.size
        split_blocks = split_size = 0
        for neighbor in (block.prev, block.next):
            if neighbor is not None and not neighbor.allocated:
                subsumed = try_merge_blocks(block, neighbor)
                if subsumed:
                    # The merged block takes the place of its free neighbor in `inactive_split`.
                    split_blocks -= 1
                    split_size -= subsumed
        block.pool.insert_into_blocks(block)
        if block.is_split():
            split_blocks += 1
            split_size += block.size
        block.pool.stats.block_freed(size, block.requested_size)
        # PyTorch does not count the splits of expandable segments as inactive.
        if split_size and block.expandable_segment is None:
            block.pool.inactive_split_changed(split_blocks, split_size)

    def record_stream(self, block: Block, stream: int) -> None:
        """Record that a block is also used on `stream`, like `Tensor.record_stream`."""
        with self._mutex:
            if stream != block.stream:
                block.stream_uses = {stream, *(block.stream_uses or ())}

    def complete_events(self, block: Block) -> None:
        """Complete the events that a freed block waits for; do nothing if it does not wait."""
        with self._mutex:
            self._events.complete(block)

    def would_reuse(self, orig_size: int, stream: int = 0) -> bool:
        """Return whether a free block is large enough, ignoring the rules for oversize blocks."""
        with self._mutex:
            size = self._round_size(orig_size)
            free = self.get_pool(size, stream).of_stream(stream)
            return next(free.at_least(size), None) is not None

    def get_pool(self, size: int, stream: int) -> BlockPool:
        """Return the pool for a request of this rounded size."""
        private = self._private_pools.get_pool(size, stream) if self._private_pools.routes else None
        if private is not None:
            return private
        return self._small_blocks if size <= SMALL_SIZE else self._large_blocks

    def empty_cache(self, pool_id: PoolId = DEFAULT_POOL) -> None:
        """Give every free segment back to the driver, like `torch.cuda.empty_cache()`.

        With the id of a private pool without users, give back only the segments of that pool.
        """
        with self._mutex:
            self._memory.release_cached_blocks(pool_id, self._events)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to a fraction of the GPU; 1.0 removes the limit.

        Raises:
            ValueError: `fraction` is not between 0 and 1.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self.set_memory_limit(None if fraction == 1 else int(fraction * self.gpu.total_bytes))

    def set_memory_limit(self, limit: int | None) -> None:
        """Limit reserved memory to `limit` bytes; None removes the limit."""
        memory, config = self._memory, self.config
        memory.allowed_memory_maximum = limit
        # With any of these, PyTorch's search is more than the best fit of one set of blocks.
        self.takes_best_fit = not (
            config.expandable_segments
            or config.max_split_size is not None
            or memory.collects_garbage
        )

    def create_or_incref_pool(
        self, pool_id: PoolId, *, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        """Create a private pool, like `torch.cuda.MemPool()`, or add a user to an existing one."""
        with self._mutex:
            self._private_pools.create_or_incref_pool(
                pool_id, use_on_oom=use_on_oom, no_split=no_split
            )

    def begin_allocate_to_pool(
        self, pool_id: PoolId, accepts: StreamFilter = lambda _: True
    ) -> None:
        """Enter `torch.cuda.use_mem_pool(pool)` for requests on the streams that `accepts` matches.

        Raises:
            ValueError: requests go to this pool already.
        """
        with self._mutex:
            self._private_pools.begin_allocate_to_pool(pool_id, accepts)

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Leave `torch.cuda.use_mem_pool(pool)`, which also calls `release_pool`.

        Raises:
            ValueError: no requests go to this pool.
        """
        with self._mutex:
            self._private_pools.end_allocate_to_pool(pool_id)

    def release_pool(self, pool_id: PoolId) -> None:
        """Remove a user of a private pool.

        Deleting a `MemPool` does this and then calls `empty_cache(pool_id)`.
        """
        with self._mutex:
            self._private_pools.release_pool(pool_id)

    def attach_out_of_memory_observer(self, observer: OomObserver) -> None:
        """Call `observer` before each OutOfMemoryError, after the cache was released."""
        self._oom_observers.append(observer)

    def memory_stats_as_nested_dict(self) -> dict[str, Any]:
        """Return `torch.cuda.memory_stats_as_nested_dict()` of this device."""
        with self._mutex:
            return self._stats.as_nested_dict()

    def memory_snapshot(self) -> list[SegmentInfo]:
        """Return `torch.cuda.memory_snapshot()` of this device: segments by address, no traces."""
        with self._mutex:
            return segment_infos((*self.active_blocks, *self._memory.free_blocks()), self.device)

    def releasable_bytes(self) -> int:
        """Return the free bytes of the default pools that `empty_cache` would give back."""
        with self._mutex:
            return self._memory.releasable_bytes()

    def reset_peak_memory_stats(self) -> None:
        """Set every peak to its current value."""
        with self._mutex:
            self._stats.reset_peak()

    def reset_accumulated_memory_stats(self) -> None:
        """Set all sums and counters to 0."""
        with self._mutex:
            self._stats.reset_accumulated()

    def restore(
        self,
        segments: Iterable[SegmentInfo],
        first_addresses: Mapping[RangeKey, int] = MappingProxyType({}),
        oldest_first: Iterable[int] = (),
    ) -> dict[int, Block]:
        """Load the segments of another allocator's `memory_snapshot()` into this unused allocator.

        Each private pool gets one user.

        Args:
            segments: the segments of one device.
            first_addresses: where the address ranges of expandable segments start, if that is below
                their first segment.
            oldest_first: the addresses of segments, or of blocks if the order is "block", in the
                order of their age; the others follow by address. Expandable segments are always in
                the order of addresses.

        Returns:
            The blocks that are in use or wait for other streams, by address.

        Raises:
            ValueError: the GPU has too little memory.
        """
        with self._mutex:
            numbers = {address: next(self._memory.counter) for address in oldest_first}
            blocks = list(restore_blocks(self._memory, segments, first_addresses, numbers))
            # Without the setting, PyTorch skips free blocks of expandable segments.
            restored = (*blocks, *self._memory.free_blocks())
            self.takes_best_fit &= all(block.expandable_segment is None for block in restored)
            self.active_blocks.update(blocks)
            for block in blocks:
                if block.stream_uses:
                    self._events.insert_events(block)
            self._stats.reset_peak()
            self._stats.reset_accumulated()
            return {block.address: block for block in blocks}

    def _search_or_allocate(
        self, orig_size: int, size: int, pool: BlockPool, stream: int
    ) -> Block | None:
        alloc_size = self.config.get_allocation_size(size)
        params = AllocParams(
            orig_size, size, stream, pool, alloc_size, self.config.expandable_segments
        )
        block = None if self.takes_best_fit else self._memory.get_free_block(params)
        return block or self._memory.get_new_block(params, self._events)

    def _alloc_found_block(self, block: Block, size: int, orig_size: int, *, split: bool) -> Block:
        pool = block.pool
        already_split = block.prev is not None or block.next is not None
        inactive_split = None
        if split:
            remaining = block
            block = split_head(remaining, size)
            pool.insert_into_blocks(remaining)
            # The rest of a part of a segment was counted before; the rest of a whole segment was
            # not.
            inactive_split = (0, -size) if already_split else (1, remaining.size)
        elif already_split:
            inactive_split = (-1, -block.size)
        block.allocated = True
        block.requested_size = orig_size
        self.active_blocks.add(block)
        pool.stats.block_allocated(block.size, orig_size)
        if inactive_split is not None and block.expandable_segment is None:
            pool.inactive_split_changed(*inactive_split)
        if block.size >= self._max_split_size:
            self._stats.oversize_allocations.increase(1)
        return block

    def _notify_oom_observers(self, details: OutOfMemoryDetails) -> None:
        # torch/csrc/cuda/Module.cpp calls this argument `device_allocated`, but it is the limit.
        total = details.total if details.allowed is None else details.allowed
        for observer in list(self._oom_observers):
            observer(details.device, details.requested, total, details.free)
