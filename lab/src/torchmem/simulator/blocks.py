"""Blocks of memory, the pools that hold the free ones, and the search for a block that fits.

Names follow c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13. Free blocks are ordered by size, and
those of equal size by a `BlockOrder`.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIN_BLOCK_SIZE, SMALL_SIZE
from torchmem.allocator.snapshot import PoolId
from torchmem.simulator.stats import DeviceStats, PoolStats, Stat

BlockOrder = Literal["address", "block", "segment"]
"""Which of several free blocks of equal size a request gets.

"address": the one at the lowest address; PyTorch up to 2.11 (`BlockComparatorSize`).
"block": the one whose `Block` object is the oldest; 2.12 (`BlockComparatorRegistrationCounter`).
"segment": the one in the oldest segment, then at the lowest address; 2.13 and newer
(`BlockComparatorSizeCounterAddress`, pytorch/pytorch#183591).
"""

_ORDERS: tuple[tuple[tuple[int, int], BlockOrder], ...] = (
    ((2, 13), "segment"),
    ((2, 12), "block"),
    ((0, 0), "address"),
)
"""The first version with each order, the newest first."""


def block_order(torch_version: str) -> BlockOrder | None:
    """Return the order of a version such as "2.13.0+cu130"; None if it is not a version."""
    match = re.match(r"(\d{1,3})\.(\d{1,3})", torch_version)
    if match is None:
        return None
    version = int(match[1]), int(match[2])
    return next(order for first, order in _ORDERS if version >= first)


ADDRESS_BITS = 48
"""Bits of a CUDA address. Size, age and address sort as one integer: faster than a tuple."""
SIZE_SHIFT = ADDRESS_BITS + 32
"""Leaves room for the age of 2^32 segments below the size."""
MAX_RUN_LENGTH = 2048
"""A longer run of sorted keys is split in two, so that no insertion moves more keys than this."""
UNLIMITED = (1 << 64) - 1
"""`max_split_size` if none is set."""

_address = attrgetter("address")


@dataclass(frozen=True, slots=True, eq=False)
class ExpandableSegment:
    """An address range of 9/8 of the GPU's memory, in whole pages of `segment_size` bytes."""

    address: int
    segment_size: int

    def left(self, address: int) -> int:
        """Return the start of the page that holds `address`."""
        return address - (address - self.address) % self.segment_size

    def page_parts(self, address: int, size: int) -> int:
        """Return the bytes of `size` bytes from `address` that are not whole pages."""
        if size < self.segment_size:
            return size
        start = (self.address - address) % self.segment_size
        return start + (size - start) % self.segment_size

    def right(self, address: int) -> int:
        """Return the end of the last page that starts before `address`."""
        return self.left(address + self.segment_size - 1)


@dataclass(slots=True, eq=False)
class Block:
    """A part of one segment; `prev` and `next` are its neighbors in that segment.

    Sizes are bytes. `requested_size` is what the latest owner requested; it is stale once the block
    is free. `stream_uses` are the other streams that its owner used it on, and `event_count` is the
    number of their events that the freed block still waits for. `registration_counter` is the
    number of its segment, counted from the oldest, or its own number if the order is "block".
    `page_parts` are the bytes of a free block of an expandable segment that are not whole pages.
    """

    stream: int
    size: int
    pool: BlockPool
    address: int
    allocated: bool = False
    requested_size: int = 0
    prev: Block | None = None
    next: Block | None = None
    registration_counter: int = 0
    expandable_segment: ExpandableSegment | None = None
    mapped: bool = True
    event_count: int = 0
    stream_uses: set[int] | None = None
    gc_count_base: int = 0
    page_parts: int = 0

    def is_split(self) -> bool:
        """Return whether the segment has other blocks, so that the driver cannot take it back."""
        return self.prev is not None or self.next is not None

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Insert this block between two neighbors."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


def part_of(block: Block, address: int, size: int) -> Block:
    """Return a new block of the same segment, without neighbors."""
    numbers = block.pool.numbers
    return Block(
        block.stream,
        size,
        block.pool,
        address,
        registration_counter=block.registration_counter if numbers is None else next(numbers),
        expandable_segment=block.expandable_segment,
    )


def split_head(remaining: Block, size: int) -> Block:
    """Split `size` bytes off the head of a block and return them.

    The old object becomes the tail, as in `alloc_found_block`.
    """
    head = part_of(remaining, remaining.address, size)
    before = head.prev = remaining.prev
    if before is not None:
        before.next = head
    head.next = remaining
    remaining.prev = head
    remaining.address += size
    remaining.size -= size
    return head


def try_merge_blocks(dst: Block, src: Block | None) -> int:
    """Merge the free neighbor `src` into `dst` and return its bytes.

    Return 0 if `src` is in use, or if only one of the two is mapped.
    """
    if src is None or src.allocated or src.event_count or src.mapped is not dst.mapped:
        return 0
    if src.mapped:
        src.pool.erase(src)
    else:
        src.pool.erase_unmapped(src)
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


@dataclass(slots=True, eq=False)
class FreeBlocks:
    """The free blocks of one pool and one stream, as runs of sorted keys.

    `last` holds the last key of each run.
    """

    runs: list[list[int]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)

    def insert(self, block: Block) -> None:
        """Add a free block."""
        key = block.size << SIZE_SHIFT | block.registration_counter << ADDRESS_BITS | block.address
        self.blocks[key] = block
        index = bisect_left(self.last, key)
        if index == len(self.last):
            self._append(key)
            return
        run = self.runs[index]
        insort(run, key)
        if len(run) > MAX_RUN_LENGTH:
            self._split_run(index)

    def erase(self, block: Block) -> None:
        """Remove a block; its size and address must be those that it was inserted with."""
        key = block.size << SIZE_SHIFT | block.registration_counter << ADDRESS_BITS | block.address
        index = bisect_left(self.last, key)
        self._pop(index, bisect_left(self.runs[index], key))

    def pop_best_fit(self, size: int) -> Block | None:
        """Remove and return the first block of at least `size` bytes."""
        key = size << SIZE_SHIFT
        index = bisect_left(self.last, key)
        if index == len(self.last):
            return None
        return self._pop(index, bisect_left(self.runs[index], key))

    def at_least(self, size: int) -> Iterator[Block]:
        """Iterate over the blocks of at least `size` bytes, the best fit first.

        The blocks must not change during the iteration.
        """
        key = size << SIZE_SHIFT
        index = bisect_left(self.last, key)
        if index < len(self.last):
            run = self.runs[index]
            yield from map(self.blocks.__getitem__, run[bisect_left(run, key) :])
        for run in self.runs[index + 1 :]:
            yield from map(self.blocks.__getitem__, run)

    def __iter__(self) -> Iterator[Block]:
        return self.at_least(0)

    def _pop(self, index: int, position: int) -> Block:
        run = self.runs[index]
        key = run.pop(position)
        if not run:
            del self.runs[index], self.last[index]
        elif position == len(run):
            self.last[index] = run[-1]
        return self.blocks.pop(key)

    def _append(self, key: int) -> None:
        """Add a key that is larger than all others."""
        if not self.last or len(self.runs[-1]) == MAX_RUN_LENGTH:
            self.runs.append([key])
            self.last.append(key)
        else:
            self.runs[-1].append(key)
            self.last[-1] = key

    def _split_run(self, index: int) -> None:
        run, half = self.runs[index], MAX_RUN_LENGTH // 2
        self.runs[index : index + 1] = [run[:half], run[half:]]
        self.last.insert(index, run[half - 1])


@dataclass(slots=True, eq=False)
class BlockPool:
    """The free blocks of the small or the large pool, separate for each stream.

    `stats` are the statistics of the small or the large pool, which private pools share. `unmapped`
    are the address ranges of expandable segments without memory, by address. `owner` is the private
    pool that this pool belongs to, if any. `numbers` are for new blocks if their order is "block".
    """

    is_small: bool
    device_stats: DeviceStats
    streams: defaultdict[int, FreeBlocks] = field(default_factory=lambda: defaultdict(FreeBlocks))
    unmapped: dict[int, list[Block]] = field(default_factory=dict)
    owner: PrivatePool | None = None
    numbers: Iterator[int] | None = None
    get_free_blocks_call_count: int = 0
    stats: PoolStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = self.device_stats.of_pool(is_small=self.is_small)

    def of_stream(self, stream: int) -> FreeBlocks:
        """Return the free blocks that a request on `stream` may use."""
        return self.streams[stream]

    def add_reserved(self, size: int) -> None:
        """Count memory that the driver gave to this pool."""
        self.stats.reserved_bytes.increase(size)
        if self.owner is not None:
            self.owner.reserved_bytes(is_small=self.is_small).increase(size)

    def subtract_reserved(self, size: int) -> None:
        """Count memory that this pool gave back to the driver."""
        self.stats.reserved_bytes.current -= size
        if self.owner is not None:
            self.owner.reserved_bytes(is_small=self.is_small).current -= size

    def insert_into_blocks(self, block: Block) -> None:
        """Add a free block; its age for the garbage collection starts at 0."""
        block.gc_count_base = self.get_free_blocks_call_count
        self.streams[block.stream].insert(block)
        segment = block.expandable_segment
        if segment is not None and self.owner is None:
            parts = block.size
            if parts >= segment.segment_size:
                parts = segment.page_parts(block.address, parts)
            block.page_parts = parts
            self.device_stats.stranded_offset += parts

    def erase(self, block: Block) -> None:
        """Remove a free block."""
        self.streams[block.stream].erase(block)
        if block.page_parts:
            self.device_stats.stranded_offset -= block.page_parts

    def inactive_split_changed(self, blocks: int, size: int) -> None:
        """Change the number and bytes of free blocks that share their segment with other blocks."""
        stats = self.stats
        if blocks > 0:
            stats.inactive_split.increase(blocks)
        else:
            stats.inactive_split.current += blocks
        if size > 0:
            stats.inactive_split_bytes.increase(size)
        else:
            stats.inactive_split_bytes.current += size
        if self.owner is not None:
            self.device_stats.stranded_offset -= size

    def insert_unmapped(self, block: Block) -> None:
        """Add an address range without memory."""
        ranges = self.unmapped.setdefault(block.stream, [])
        ranges.insert(bisect_left(ranges, block.address, key=_address), block)

    def erase_unmapped(self, block: Block) -> None:
        """Remove an address range without memory."""
        ranges = self.unmapped[block.stream]
        del ranges[bisect_left(ranges, block.address, key=_address)]

    def __iter__(self) -> Iterator[Block]:
        for free in self.streams.values():
            yield from free


@dataclass(slots=True, eq=False)
class PrivatePool:
    """A private pool of a `torch.cuda.MemPool` or a CUDA graph, with free lists of its own.

    `use_count` is 1 for its `MemPool`, plus 1 for each open `use_mem_pool` context; at 0 its cached
    memory may go back to the driver. Pools with an allocator of their own (`MemPool(allocator)`)
    are not simulated.
    """

    id: PoolId
    stats: DeviceStats
    small_blocks: BlockPool
    large_blocks: BlockPool
    use_on_oom: bool = False
    no_split: bool = False
    use_count: int = 1

    def blocks(self, size: int) -> BlockPool:
        """Return the free blocks for a request of this rounded size."""
        return self.small_blocks if size <= SMALL_SIZE else self.large_blocks

    def reserved_bytes(self, *, is_small: bool) -> Stat:
        """Return the statistic of this pool's reserved bytes, small or large."""
        reserved = self.stats.reserved_bytes_of(self.id)
        return reserved.small_pool if is_small else reserved.large_pool


@dataclass(frozen=True, slots=True)
class AllocParams:
    """One request: its requested and rounded size, stream, pool and segment size, in bytes."""

    orig_size: int
    size: int
    stream: int
    pool: BlockPool
    alloc_size: int
    is_expandable_segments_active: bool


def get_free_block(params: AllocParams, config: AllocatorConfig) -> Block | None:
    """Remove and return the free block for a request, or None if it needs new memory.

    Only one candidate is checked against the rules for oversize blocks; if they reject it, no other
    block is tried.
    """
    candidates = params.pool.of_stream(params.stream).at_least(params.size)
    block = next(candidates, None)
    if block is not None and block.expandable_segment is not None:
        if params.is_expandable_segments_active:
            block = _least_expandable(block, candidates)
        else:
            block = next((other for other in candidates if other.expandable_segment is None), None)
    if block is None or not config.may_use(block.size, params.size):
        return None
    params.pool.erase(block)
    return block


def should_split(
    block: Block, size: int, is_expandable_segments_active: bool, max_split_size: int
) -> bool:
    """Return whether the rest of a block beyond `size` bytes becomes a free block."""
    pool, remaining = block.pool, block.size - size
    if pool.owner is not None and pool.owner.no_split:
        return False
    if pool.is_small or is_expandable_segments_active:
        return remaining >= MIN_BLOCK_SIZE
    # So a large block in use may have almost 1 MiB more than its rounded request, even if nothing
    # of it shows in a snapshot.
    return remaining > SMALL_SIZE and size < max_split_size


def _least_expandable(block: Block, candidates: Iterator[Block]) -> Block:
    """Return the best fit if the free address space behind a block counts, as `get_free_block`."""
    for following in candidates:
        if block.expandable_segment is None or _expandable_size(following) >= _expandable_size(
            block
        ):
            break
        block = following
    return block


def _expandable_size(block: Block) -> int:
    following = block.next
    return block.size if following is None or following.mapped else block.size + following.size
