"""What goes back to the driver when an allocation failed, and on `empty_cache()`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchmem.simulator.blocks import Block, BlockPool
from torchmem.simulator.card import SimulatedCard
from torchmem.simulator.expandable_segments import ExpandableSegments
from torchmem.simulator.search import AllocParams
from torchmem.simulator.stats import DeviceStats


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """Takes segments of one device from its driver and gives free ones back.

    Blocks of `max_split_size` bytes or more are oversize. `counter` numbers the segments.
    """

    card: SimulatedCard
    stats: DeviceStats
    expandable_segments: ExpandableSegments
    max_split_size: int | None
    counter: Iterator[int]

    def cuda_malloc(self, params: AllocParams) -> Block | None:
        """A new segment as one free block that is in no list yet; None when the driver refuses."""
        size, pool = params.alloc_size, params.pool
        address = self.card.cuda_malloc(size)
        if address is None:
            return None
        self.stats.num_device_alloc += 1
        pool.stats.segment.increase(1)
        for stat in pool.reserved_bytes():
            stat.increase(size)
        if self._is_oversize(size):
            self.stats.oversize_segments.increase(1)
        return Block(params.stream, size, pool, address, registration_counter=next(self.counter))

    def adopt(self, blocks: list[Block]) -> None:
        """Count a segment of these linked blocks that the driver gave before."""
        size, pool, number = sum(block.size for block in blocks), blocks[0].pool, next(self.counter)
        self.card.adopt(blocks[0].address, size)
        pool.stats.segment.increase(1)
        for stat in pool.reserved_bytes():
            stat.increase(size)
        if self._is_oversize(size):
            self.stats.oversize_segments.increase(1)
        for block in blocks:
            block.registration_counter = number

    def release_block(self, block: Block) -> None:
        """cudaFree a free block that is a whole segment."""
        pool = block.pool
        self.card.cuda_free(block.address)
        self.stats.num_device_free += 1
        pool.stats.segment.current -= 1
        for stat in pool.reserved_bytes():
            stat.current -= block.size
        if self._is_oversize(block.size):
            self.stats.oversize_segments.current -= 1
        pool.erase(block)

    def release_blocks(self, pool: BlockPool) -> None:
        """Give back every whole free segment of a pool, and the free pages of its expandable segments."""
        for block in list(pool):
            if block.expandable_segment is not None:
                self.expandable_segments.unmap_block(block)
            elif not block.is_split():
                self.release_block(block)

    def releasable_bytes(self, pool: BlockPool) -> int:
        """Free bytes of a pool that `release_blocks` would give back."""
        return sum(_releasable(block) for block in pool)

    def release_available_cached_blocks(self, params: AllocParams) -> bool:
        """Give back oversize blocks of the request's stream until the segment may fit; False when they are too few."""
        if self.max_split_size is None:
            return False
        wanted = max(params.size, self.max_split_size)
        free = params.pool.of_stream(params.stream)
        fitting = next(free.at_least(wanted), None)
        if fitting is not None and fitting.expandable_segment is None:
            self.release_block(fitting)
            return True
        released = 0
        for block in _largest_first(free.at_least(self.max_split_size), wanted):
            if released >= wanted:
                break
            if block.expandable_segment is None:
                released += block.size
                self.release_block(block)
        return released >= wanted

    def _is_oversize(self, size: int) -> bool:
        return self.max_split_size is not None and size >= self.max_split_size


def _releasable(block: Block) -> int:
    segment = block.expandable_segment
    if segment is None:
        return 0 if block.is_split() else block.size
    return max(0, segment.left(block.address + block.size) - segment.right(block.address))


def _largest_first(oversize: Iterator[Block], limit: int) -> Iterator[Block]:
    return reversed([block for block in oversize if block.size < limit])
