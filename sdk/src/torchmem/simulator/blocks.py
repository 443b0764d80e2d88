"""Blocks of memory, how they are split and merged, and the pools of those that nobody uses."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from torchmem.simulator.free_blocks import FreeBlocks
from torchmem.simulator.stats import PoolStats, Stat

if TYPE_CHECKING:
    from torchmem.simulator.expandable_segments import ExpandableSegment
    from torchmem.simulator.private_pools import PrivatePool

_address = attrgetter("address")


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of one segment (PyTorch's `Block`); `prev` and `next` are its neighbours in that segment.

    Sizes are bytes. `requested_size` is what the newest owner asked for, and goes stale when the block is freed.
    `stream_uses` are the other streams on which its owner used it; `event_count` is the number of their events that
    a freed block still waits for. `registration_counter` numbers the segments as they come.
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

    def is_split(self) -> bool:
        """Whether the segment holds other blocks too, so that this one alone cannot go back to the driver."""
        return self.prev is not None or self.next is not None

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Become the neighbour between `before` and `after`."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


@dataclass(slots=True, eq=False)
class BlockPool:
    """The free blocks of the small or the large pool (PyTorch's `BlockPool`), apart for each stream.

    `stats` are the statistics of the small or the large pool, which private pools share. `unmapped` are the address
    ranges of expandable segments without memory, by address. `owner` is the private pool that this is a part of.
    """

    is_small: bool
    stats: PoolStats
    streams: defaultdict[int, FreeBlocks] = field(default_factory=lambda: defaultdict(FreeBlocks))
    unmapped: dict[int, list[Block]] = field(default_factory=dict)
    owner: PrivatePool | None = None
    get_free_blocks_call_count: int = 0

    def of_stream(self, stream: int) -> FreeBlocks:
        """The free blocks that a request on `stream` may use."""
        return self.streams[stream]

    def reserved_bytes(self) -> tuple[Stat, ...]:
        """The statistics of reserved bytes that a segment of this pool counts in."""
        reserved = self.stats.reserved_bytes
        return (reserved,) if self.owner is None else (reserved, self.owner.reserved_bytes(is_small=self.is_small))

    def insert_into_blocks(self, block: Block) -> None:
        """Add a free block; its age for the garbage collection starts."""
        block.gc_count_base = self.get_free_blocks_call_count
        self.streams[block.stream].insert(block)

    def erase(self, block: Block) -> None:
        """Remove a free block."""
        self.streams[block.stream].erase(block)

    def insert_unmapped(self, block: Block) -> None:
        """Add a range without memory."""
        ranges = self.unmapped.setdefault(block.stream, [])
        ranges.insert(bisect_left(ranges, block.address, key=_address), block)

    def erase_unmapped(self, block: Block) -> None:
        """Remove a range without memory."""
        ranges = self.unmapped[block.stream]
        del ranges[bisect_left(ranges, block.address, key=_address)]

    def __iter__(self) -> Iterator[Block]:
        for free in self.streams.values():
            yield from free


def part_of(block: Block, address: int, size: int) -> Block:
    """A new block of the same segment, which has no neighbours yet."""
    return Block(
        block.stream, size, block.pool, address,
        registration_counter=block.registration_counter, expandable_segment=block.expandable_segment,
    )  # fmt: skip


def split_head(remaining: Block, size: int) -> Block:
    """Cut `size` bytes off the head of a block; the old object goes on as the tail, as in `alloc_found_block`."""
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
    """Let `dst` swallow its free neighbour `src`; the bytes won, 0 when `src` is in use or one of them unmapped."""
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
