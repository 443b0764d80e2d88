"""Expandable segments: address ranges in which memory is mapped and unmapped page by page.

Names follow c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchmem.allocator.sizes import SMALL_BUFFER
from torchmem.simulator.blocks import (
    AllocParams,
    Block,
    BlockPool,
    ExpandableSegment,
    part_of,
    try_merge_blocks,
)
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.stats import DeviceStats


@dataclass(frozen=True, slots=True)
class ExpandableSegments:
    """The expandable segments of one device.

    `large_segment_size` is the page size of the large pool. `counter` numbers the address ranges.
    """

    gpu: SimulatedGpu
    stats: DeviceStats
    large_segment_size: int
    counter: Iterator[int]

    def try_allocate_expandable_block(self, params: AllocParams) -> Block | None:
        """Map memory for a request and return a block of at least its size, out of its pool.

        Return None if the driver has too little memory; pages that were mapped until then stay
        mapped.
        """
        candidate = self.find_expandable_block(params)
        if not candidate.mapped and not self.map_block(candidate, min(candidate.size, params.size)):
            return None
        while candidate.size < params.size:
            unmapped = candidate.next
            if unmapped is None:
                return None
            if not self.map_block(unmapped, min(params.size - candidate.size, unmapped.size)):
                return None
            candidate = unmapped
        params.pool.erase(candidate)
        return candidate

    def find_expandable_block(self, params: AllocParams) -> Block:
        """Return the lowest free or unmapped block with enough address space behind it.

        If there is none, reserve a new address range.
        """
        for unmapped in params.pool.unmapped.get(params.stream, ()):
            before = unmapped.prev
            start = before if before is not None and _is_allocatable(before) else unmapped
            if _has_available_address_space(start, params.size):
                return start
        return self._reserve_range(params.pool, params.stream, None)

    def map_block(self, to_map: Block, size: int) -> bool:
        """Map the first `size` bytes of an unmapped block, in whole pages.

        The block becomes a free block of its pool. Return False if the driver has too little
        memory.
        """
        pool = to_map.pool
        mapped_size = _segment_of(to_map).right(to_map.address + size) - to_map.address
        if not self.gpu.mem_map(to_map.address, mapped_size):
            return False
        pool.erase_unmapped(to_map)
        to_map.mapped = True
        if mapped_size < to_map.size:
            remaining = part_of(to_map, to_map.address + mapped_size, to_map.size - mapped_size)
            remaining.mapped = False
            remaining.splice(to_map, to_map.next)
            pool.insert_unmapped(remaining)
            to_map.size = mapped_size
        try_merge_blocks(to_map, to_map.prev)
        try_merge_blocks(to_map, to_map.next)
        pool.insert_into_blocks(to_map)
        # PyTorch's `map_block` does not count a segment: `segment` is 0 for expandable segments.
        self.stats.num_device_alloc += 1
        pool.add_reserved(mapped_size)
        return True

    def unmap_block(self, block: Block) -> None:
        """Unmap the pages that lie entirely in a free block; its ends remain free blocks."""
        segment, pool = _segment_of(block), block.pool
        begin, end = segment.right(block.address), segment.left(block.address + block.size)
        if begin >= end:
            return
        pool.erase(block)
        if begin > block.address:
            before_free = part_of(block, block.address, begin - block.address)
            before_free.splice(block.prev, block)
            pool.insert_into_blocks(before_free)
        if end < block.address + block.size:
            after_free = part_of(block, end, block.address + block.size - end)
            after_free.splice(block, block.next)
            pool.insert_into_blocks(after_free)
        self._unmap(block, begin, end)

    def adopt(self, before: Block | None, blocks: list[Block], first: int) -> Block:
        """Count linked blocks as memory that is mapped already.

        Args:
            before: an unmapped block that the blocks may lie in; if it does not reach far enough, a
                new range starts at `first`.
            blocks: neighbors, by address.
            first: the first address of a new range.

        Returns:
            The unmapped block behind the last of `blocks`.

        Raises:
            ValueError: the GPU has too little memory.
        """
        head, tail = blocks[0], blocks[-1]
        pool, size, end = head.pool, sum(block.size for block in blocks), tail.address + tail.size
        if before is None or end > before.address + before.size:
            before = self._reserve_range(pool, head.stream, first)
        self.gpu.adopt(head.address, size)
        pool.add_reserved(size)
        behind = part_of(before, end, before.address + before.size - end)
        behind.mapped = False
        pool.erase_unmapped(before)
        before.size = head.address - before.address
        if before.size:
            pool.insert_unmapped(before)
        head.splice(before if before.size else before.prev, head.next)
        behind.splice(tail, None)
        pool.insert_unmapped(behind)
        for block in blocks:
            block.expandable_segment = before.expandable_segment
            block.registration_counter = before.registration_counter
        return behind

    def _unmap(self, block: Block, begin: int, end: int) -> None:
        pool, size = block.pool, end - begin
        block.address, block.size, block.mapped = begin, size, False
        try_merge_blocks(block, block.prev)
        try_merge_blocks(block, block.next)
        self.gpu.mem_unmap(begin, size)
        self.stats.num_device_free += 1
        pool.subtract_reserved(size)
        # A range without any memory goes back to the driver (release_expandable_segment).
        if block.is_split():
            pool.insert_unmapped(block)

    def _reserve_range(self, pool: BlockPool, stream: int, address: int | None) -> Block:
        page = SMALL_BUFFER if pool.is_small else self.large_segment_size
        total = self.gpu.total_bytes
        # PyTorch reserves 1 1/8 of the GPU's memory, so that pages unmapped at the front can be
        # mapped at the end (`ExpandableSegment`).
        size = -(-(total + total // 8) // page) * page
        if address is None:
            address = self.gpu.reserve_addresses(size)
        number = next(self.counter)
        block = Block(stream, size, pool, address, mapped=False, registration_counter=number)
        block.expandable_segment = ExpandableSegment(address, page)
        pool.insert_unmapped(block)
        return block


def _segment_of(block: Block) -> ExpandableSegment:
    if block.expandable_segment is None:
        raise ValueError(f"the block at {block.address:#x} is in no expandable segment")
    return block.expandable_segment


def _is_allocatable(block: Block) -> bool:
    return not block.allocated and not block.event_count


def _has_available_address_space(block: Block | None, size: int) -> bool:
    available = 0
    while available < size and block is not None and _is_allocatable(block):
        available += block.size
        block = block.next
    return available >= size
