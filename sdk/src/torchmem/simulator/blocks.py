"""Blocks of memory and the pools of free ones, searched by best fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchmem.simulator.stats import PoolStats

ADDRESS_BITS = 48
"""A CUDA address fits: size and address together sort as one integer, which is cheaper to compare than a pair."""


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of one segment (PyTorch's `Block`); `prev` and `next` are its neighbours in that segment.

    Sizes are bytes. `requested_size` is what the newest owner asked for, and goes stale when the block is freed.
    """

    stream: int
    size: int
    pool: BlockPool
    address: int
    allocated: bool = False
    requested_size: int = 0
    prev: Block | None = None
    next: Block | None = None

    def is_split(self) -> bool:
        """Whether the segment holds other blocks too, so that this one alone cannot go back to the driver."""
        return self.prev is not None or self.next is not None


@dataclass(slots=True, eq=False)
class FreeBlocks:
    """Free blocks of one pool and one stream, in the order of size, then address."""

    keys: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def insert(self, block: Block) -> None:
        """Add a free block."""
        key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)

    def erase(self, block: Block) -> None:
        """Remove a block that is in here, with the size and address under which it came in."""
        index = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[index]
        del self.blocks[index]

    def pop_best_fit(self, size: int) -> Block | None:
        """Remove and return the smallest block that holds `size` bytes, the lowest address among equals."""
        index = bisect_left(self.keys, size << ADDRESS_BITS)
        if index == len(self.keys):
            return None
        del self.keys[index]
        return self.blocks.pop(index)


@dataclass(slots=True, eq=False)
class BlockPool:
    """The free blocks of the small or the large pool (PyTorch's `BlockPool`), apart for each stream.

    `stats` are the statistics that a change in this pool touches: those of all pools together, and its own.
    """

    is_small: bool
    stats: tuple[PoolStats, PoolStats]
    streams: dict[int, FreeBlocks] = field(default_factory=dict)

    def of_stream(self, stream: int) -> FreeBlocks:
        """The free blocks that a request on `stream` may use."""
        free = self.streams.get(stream)
        if free is None:
            free = self.streams[stream] = FreeBlocks()
        return free

    def __iter__(self) -> Iterator[Block]:
        for free in self.streams.values():
            yield from free.blocks
