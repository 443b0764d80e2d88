"""The CUDA caching allocator of one device under PyTorch's default settings.

Functions bear the names of `DeviceCachingAllocator` in c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13, and do what
they do there.
"""

from __future__ import annotations

from threading import RLock
from typing import Any

from torchmem.core.backend import OomObserver
from torchmem.core.sizes import MIN_BLOCK_SIZE, SMALL_SIZE, get_allocation_size, round_size
from torchmem.core.snapshot import SegmentInfo
from torchmem.simulator.blocks import Block, BlockPool
from torchmem.simulator.card import SimulatedCard
from torchmem.simulator.errors import OomReport, OutOfMemoryError
from torchmem.simulator.snapshot import segment_infos
from torchmem.simulator.stats import DeviceStats


class DeviceCachingAllocator:
    """Hands out blocks of cached segments on one simulated card; safe to read from another thread, like PyTorch's."""

    def __init__(self, card: SimulatedCard, device: int = 0) -> None:
        self.card = card
        self.device = device
        self.allowed_memory_maximum: int | None = None
        self._mutex = RLock()
        self._stats = stats = DeviceStats()
        self._small_blocks = BlockPool(is_small=True, stats=(stats.all, stats.small_pool))
        self._large_blocks = BlockPool(is_small=False, stats=(stats.all, stats.large_pool))
        self._active_blocks: set[Block] = set()
        self._oom_observers: list[OomObserver] = []

    def malloc(self, orig_size: int, stream: int = 0) -> Block:
        """A block of at least `orig_size` bytes for `stream`.

        Raises:
            OutOfMemoryError: no free block fits, and the driver gives no segment even after the cache was released.
        """
        with self._mutex:
            size = round_size(orig_size)
            pool = self._get_pool(size)
            block = pool.of_stream(stream).pop_best_fit(size) or self._get_new_block(size, pool, stream)
            if block is not None:
                return self._alloc_found_block(block, size, orig_size)
            self._stats.num_ooms += 1
            report = self._oom_report(get_allocation_size(size))
        self._notify_oom_observers(report)
        raise OutOfMemoryError(report)

    def free(self, block: Block) -> None:
        """Return a block that `malloc` gave.

        Raises:
            ValueError: the block is not allocated.
        """
        with self._mutex:
            if not block.allocated:
                msg = f"invalid device pointer: {block.address:#x} is not allocated"
                raise ValueError(msg)
            block.allocated = False
            for stats in block.pool.stats:
                stats.block_returned(block.size)
            self._free_block(block)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`: give every segment without a live block back to the driver."""
        with self._mutex:
            self._release_cached_blocks()

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to `fraction` of the card; 1.0 lifts the limit.

        Raises:
            ValueError: `fraction` is not between 0 and 1.
        """
        if not 0 <= fraction <= 1:
            msg = f"Invalid fraction value: {fraction}. Allowed range: 0~1"
            raise ValueError(msg)
        self.allowed_memory_maximum = None if fraction == 1 else int(fraction * self.card.total_bytes)

    def attach_out_of_memory_observer(self, observer: OomObserver) -> None:
        """Call `observer` at each OutOfMemoryError, after the cache was released and before the error is raised."""
        self._oom_observers.append(observer)

    def memory_stats_as_nested_dict(self) -> dict[str, Any]:
        """`torch.cuda.memory_stats_as_nested_dict()` of this device."""
        with self._mutex:
            return self._stats.as_nested_dict()

    def memory_snapshot(self) -> list[SegmentInfo]:
        """`torch.cuda.memory_snapshot()` of this device: segments by address, without traces."""
        with self._mutex:
            blocks = (*self._active_blocks, *self._small_blocks, *self._large_blocks)
            return segment_infos(blocks, self.device)

    def reset_peak_memory_stats(self) -> None:
        """Set every peak to its current value."""
        with self._mutex:
            self._stats.reset_peak()

    def reset_accumulated_memory_stats(self) -> None:
        """Set all sums and counters to 0."""
        with self._mutex:
            self._stats.reset_accumulated()

    def _get_pool(self, size: int) -> BlockPool:
        return self._small_blocks if size <= SMALL_SIZE else self._large_blocks

    def _get_new_block(self, size: int, pool: BlockPool, stream: int) -> Block | None:
        alloc_size = get_allocation_size(size)
        block = self._alloc_block(alloc_size, pool, stream)
        if block is None:
            self._release_cached_blocks()
            # The pool is not searched again, as in PyTorch: only the driver is asked.
            self._stats.num_alloc_retries += 1
            block = self._alloc_block(alloc_size, pool, stream)
        return block

    def _alloc_block(self, alloc_size: int, pool: BlockPool, stream: int) -> Block | None:
        stats = self._stats
        allowed = self.allowed_memory_maximum
        if allowed is not None and stats.all.reserved_bytes.current + alloc_size > allowed:
            return None
        address = self.card.cuda_malloc(alloc_size)
        if address is None:
            return None
        stats.num_device_alloc += 1
        for pool_stats in pool.stats:
            pool_stats.segment_allocated(alloc_size)
        return Block(stream, alloc_size, pool, address)

    def _alloc_found_block(self, block: Block, size: int, orig_size: int) -> Block:
        pool = block.pool
        already_split = block.prev is not None or block.next is not None
        split = None
        if _should_split(block, size):
            remaining = block
            block = _split_head(remaining, size)
            pool.of_stream(block.stream).insert(remaining)
            split = (0, -size) if already_split else (1, remaining.size)
        elif already_split:
            split = (-1, -block.size)
        block.allocated = True
        block.requested_size = orig_size
        self._active_blocks.add(block)
        for stats in pool.stats:
            stats.block_allocated(block.size, orig_size)
            if split is not None:
                stats.inactive_split_changed(*split)
        return block

    def _free_block(self, block: Block) -> None:
        self._active_blocks.remove(block)
        size = block.size
        split_blocks = split_size = 0
        for neighbour in (block.prev, block.next):
            subsumed = _try_merge_blocks(block, neighbour)
            if subsumed:
                split_blocks -= 1
                split_size -= subsumed
        block.pool.of_stream(block.stream).insert(block)
        if block.is_split():
            split_blocks += 1
            split_size += block.size
        for stats in block.pool.stats:
            stats.block_freed(size, block.requested_size)
            if split_size:
                stats.inactive_split_changed(split_blocks, split_size)

    def _release_cached_blocks(self) -> None:
        self._stats.num_sync_all_streams += 1
        self._release_blocks(self._large_blocks)
        self._release_blocks(self._small_blocks)

    def _release_blocks(self, pool: BlockPool) -> None:
        for block in list(pool):
            if not block.is_split():
                self._release_block(block)

    def _release_block(self, block: Block) -> None:
        self.card.cuda_free(block.address)
        self._stats.num_device_free += 1
        for stats in block.pool.stats:
            stats.segment_freed(block.size)
        block.pool.of_stream(block.stream).erase(block)

    def _oom_report(self, alloc_size: int) -> OomReport:
        free, total = self.card.mem_get_info()
        stats = self._stats.all
        return OomReport(
            device=self.device,
            requested=alloc_size,
            total=total,
            free=free,
            process=self.card.use.own(),
            allowed=self.allowed_memory_maximum,
            allocated=stats.allocated_bytes.current,
            unallocated=stats.reserved_bytes.current - stats.allocated_bytes.current,
        )

    def _notify_oom_observers(self, report: OomReport) -> None:
        total = report.total if report.allowed is None else report.allowed
        for observer in list(self._oom_observers):
            observer(report.device, report.requested, total, report.free)


def _should_split(block: Block, size: int) -> bool:
    remaining = block.size - size
    return remaining >= MIN_BLOCK_SIZE if block.pool.is_small else remaining > SMALL_SIZE


def _split_head(remaining: Block, size: int) -> Block:
    """Cut `size` bytes off the head of a block; the old object goes on as the tail, as in PyTorch."""
    head = Block(remaining.stream, size, remaining.pool, remaining.address, prev=remaining.prev, next=remaining)
    if head.prev is not None:
        head.prev.next = head
    remaining.prev = head
    remaining.address += size
    remaining.size -= size
    return head


def _try_merge_blocks(dst: Block, src: Block | None) -> int:
    """Let `dst` swallow its free neighbour `src`; the bytes won, 0 when `src` is in use."""
    if src is None or src.allocated:
        return 0
    src.pool.of_stream(src.stream).erase(src)
    if dst.prev is src:
        dst.address = src.address
        dst.prev = src.prev
        if dst.prev is not None:
            dst.prev.next = dst
    else:
        dst.next = src.next
        if dst.next is not None:
            dst.next.prev = dst
    dst.size += src.size
    return src.size
