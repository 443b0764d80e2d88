"""A replay that puts every block where it was recorded, to see which blocks it was chosen from.

It follows free blocks as PyTorch does, but decides nothing: the recording does. Expandable
segments are left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Protocol

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIN_BLOCK_SIZE, SMALL_BUFFER, SMALL_SIZE
from torchmem.allocator.snapshot import PoolId, SegmentInfo
from torchmem.trace.recording import Event

MAX_SLACK = SMALL_SIZE
"""A block of the large pool may be longer than its request by this much (`should_split`)."""
MAX_MISPLACED_SHARE = 0.05
MIN_MISPLACED = 50
"""With more blocks than this that no free block explains, the rest of a trace is useless."""
MAX_RIVALS = 64
"""Free blocks of equal size that one choice is compared with; more add no evidence."""

PlaceKey = tuple[PoolId, int, bool]
"""Pool, stream, and whether it is the small pool: requests share free blocks within one."""


@dataclass(slots=True, eq=False)
class PlacedBlock:
    """A block; `prev` and `next` are its neighbors in its segment.

    `segment` and `number` are the ages of its segment and of its `Block` object, counted from 1 in
    the order of their creation; below 0 for those from before the trace, whose order is unknown.
    `is_initial` is whether it has been in use since before the trace.
    """

    address: int
    size: int
    key: PlaceKey
    segment: int
    number: int
    free: bool = True
    is_initial: bool = False
    prev: PlacedBlock | None = None
    next: PlacedBlock | None = None


class Observer(Protocol):
    """Learns from the choices of the recorded allocator."""

    def on_choice(self, chosen: PlacedBlock, rivals: Iterable[PlacedBlock]) -> None:
        """Take note of a free block that was preferred to others of equal size."""


@dataclass(slots=True)
class FreeBlocksBySize:
    """The free blocks of one place by size, then by address; `sizes` are the sizes in order."""

    by_size: dict[int, dict[int, PlacedBlock]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)

    def add(self, block: PlacedBlock) -> None:
        """Add a free block."""
        equal = self.by_size.get(block.size)
        if equal is None:
            equal = self.by_size[block.size] = {}
            insort(self.sizes, block.size)
        equal[block.address] = block

    def remove(self, block: PlacedBlock) -> None:
        """Remove a free block."""
        equal = self.by_size[block.size]
        del equal[block.address]
        if not equal:
            del self.by_size[block.size]
            del self.sizes[bisect_left(self.sizes, block.size)]

    def between(self, least: int, below: int) -> Iterator[PlacedBlock]:
        """Yield the blocks of `least` bytes or more, but fewer than `below`."""
        for size in self.sizes[bisect_left(self.sizes, least) : bisect_left(self.sizes, below)]:
            yield from list(self.by_size[size].values())

    def rivals(self, chosen: PlacedBlock) -> list[PlacedBlock]:
        """Return the other free blocks of its size."""
        equal = self.by_size[chosen.size]
        if len(equal) == 1:
            return []
        first = (block for _, block in zip(range(MAX_RIVALS + 1), equal.values(), strict=False))
        return [block for block in first if block is not chosen]


class ForcedReplay:
    """Replays events on the memory before them, and reports every choice to the observers.

    Attributes:
        slack: how many bytes longer than known a block from before the trace must have been, by
            its address; at most MAX_SLACK.
        misplaced: the number of allocations that no free block explains.
    """

    def __init__(
        self, segments: Iterable[SegmentInfo], config: AllocatorConfig, observers: list[Observer]
    ) -> None:
        self.slack: dict[int, int] = {}
        self.misplaced = 0
        self.initial_segments: dict[int, int] = {}
        self.initial_blocks: dict[int, int] = {}
        self._config = config
        self._max_split_size = config.max_split_size or 1 << 63
        self._observers = observers
        self._blocks: dict[int, PlacedBlock] = {}
        self._free = defaultdict[PlaceKey, FreeBlocksBySize](FreeBlocksBySize)
        self._segment_numbers, self._numbers = count(1), count(1)
        self._is_new = False
        for segment in segments:
            if not segment["is_expandable"]:
                self._load(segment)

    def run(self, events: Iterable[Event]) -> None:
        """Replay events, up to the point where too many allocations are misplaced."""
        allocations = 0
        for event in events:
            action = event.action
            if action == "alloc":
                allocations += 1
                self._alloc(event)
                if self.misplaced > MIN_MISPLACED + MAX_MISPLACED_SHARE * allocations:
                    return
            elif action == "free_completed":
                self._free_block(event.address)
            elif action == "segment_alloc":
                self._add_segment(event)
            elif action == "segment_free":
                self._drop_segment(event.address)

    def _load(self, segment: SegmentInfo) -> None:
        age = -1 - len(self.initial_segments)
        self.initial_segments[age] = segment["address"]
        key = segment["segment_pool_id"], segment["stream"], segment["segment_type"] == "small"
        blocks = []
        for info in segment["blocks"]:
            number = -1 - len(self.initial_blocks)
            self.initial_blocks[number] = info["address"]
            in_use = info["state"] != "inactive"
            block = PlacedBlock(
                info["address"], info["size"], key, age, number, not in_use, is_initial=in_use
            )
            blocks.append(block)
            self._blocks[block.address] = block
            if block.free:
                self._free[key].add(block)
        for left, right in pairwise(blocks):
            left.next, right.prev = right, left

    def _add_segment(self, event: Event) -> None:
        # The entry does not name its pool. All segments of the small pool have this size, those of
        # the large pool are larger.
        key = event.pool, event.stream, event.size == SMALL_BUFFER
        block = PlacedBlock(
            event.address, event.size, key, next(self._segment_numbers), next(self._numbers)
        )
        if event.address not in self._blocks:
            self._blocks[block.address] = block
            self._free[key].add(block)
        self._is_new = True

    def _drop_segment(self, address: int) -> None:
        block = self._blocks.get(address)
        # If the recording lost events, blocks may seem to be in use. They end all the same: the
        # next segment may have their addresses.
        while block is not None:
            if block.free:
                self._free[block.key].remove(block)
            del self._blocks[block.address]
            block = block.next

    def _alloc(self, event: Event) -> None:
        size, is_new = self._config.round_size(event.size), self._is_new
        self._is_new = False
        chosen = self._blocks.get(event.address)
        if chosen is None:
            chosen = self._behind_slack(event.address, size)
        if chosen is None or not chosen.free or chosen.size < size:
            self.misplaced += 1
            return
        if not is_new:
            self._learn(chosen, size)
        self._take(chosen, size)

    def _learn(self, chosen: PlacedBlock, size: int) -> None:
        """Draw conclusions from the choice of a free block; a new segment is not a choice."""
        free = self._free[chosen.key]
        # A smaller block that was passed over must have been too small. With max_split_size, the
        # choice need not be the best fit and proves nothing.
        if chosen.size > size and self._config.max_split_size is None and not chosen.key[2]:
            for smaller in free.between(size, chosen.size):
                self._shorten(smaller, smaller.size - size + MIN_BLOCK_SIZE)
        rivals = free.rivals(chosen)
        if rivals:
            for observer in self._observers:
                observer.on_choice(chosen, rivals)

    def _behind_slack(self, address: int, size: int) -> PlacedBlock | None:
        """Return the free block that starts at `address` if the block before it is longer."""
        for free in self._free.values():
            for block in free.between(size, 1 << 63):
                if block.address < address < block.address + block.size and not block.key[2]:
                    self._shorten(block, address - block.address)
                    return self._blocks.get(address)
        return None

    def _shorten(self, block: PlacedBlock, size: int) -> None:
        """Give the first bytes of a free block to the block before it, if that may have them."""
        before = block.prev
        if before is None or not before.is_initial or before.free:
            return
        slack = self.slack.get(before.address, 0) + size
        if slack > MAX_SLACK or size >= block.size:
            return
        self.slack[before.address] = slack
        self._free[block.key].remove(block)
        del self._blocks[block.address]
        before.size += size
        block.address += size
        block.size -= size
        self._blocks[block.address] = block
        self._free[block.key].add(block)

    def _take(self, block: PlacedBlock, size: int) -> None:
        """Put a block of `size` bytes into a free block; the rest stays free if it is split off."""
        self._free[block.key].remove(block)
        if self._is_split(block, size):
            head = PlacedBlock(
                block.address, size, block.key, block.segment, next(self._numbers), free=False
            )
            head.prev, head.next = block.prev, block
            if block.prev is not None:
                block.prev.next = head
            block.prev = head
            block.address += size
            block.size -= size
            self._blocks[head.address] = head
            self._blocks[block.address] = block
            self._free[block.key].add(block)
        else:
            block.free = False

    def _is_split(self, block: PlacedBlock, size: int) -> bool:
        """Return whether the rest becomes a block; see `torchmem.simulator.blocks.should_split`."""
        remaining = block.size - size
        if block.key[2] or self._config.expandable_segments:
            return remaining >= MIN_BLOCK_SIZE
        return remaining > SMALL_SIZE and size < self._max_split_size

    def _free_block(self, address: int) -> None:
        """Free a block; its object outlives those of the free neighbors that it merges with."""
        block = self._blocks.get(address)
        if block is None or block.free:
            return
        block.free, block.is_initial = True, False
        before, behind = block.prev, block.next
        if before is not None and before.free:
            self._free[block.key].remove(before)
            del self._blocks[block.address]
            block.address = before.address
            block.size += before.size
            block.prev = before.prev
            if block.prev is not None:
                block.prev.next = block
            self._blocks[block.address] = block
        if behind is not None and behind.free:
            self._free[block.key].remove(behind)
            del self._blocks[behind.address]
            block.size += behind.size
            block.next = behind.next
            if block.next is not None:
                block.next.prev = block
        self._free[block.key].add(block)
