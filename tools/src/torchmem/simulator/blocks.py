"""Free blocks in the order of their size, then of the age of their segment, then of their address.

Source: `BlockComparatorSizeCounterAddress`, PyTorch 2.13 (pytorch/pytorch#183591).

Blocks of memory, how they are split and merged, and the pools of those that nobody uses.

Which free block serves a request, and whether it is split, when settings or pools change the best fit.

Private pools: memory that only a `torch.cuda.MemPool`, or a CUDA graph, may use.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIN_BLOCK_SIZE, SMALL_SIZE
from torchmem.allocator.snapshot import DEFAULT_POOL, PoolId
from torchmem.simulator.stats import DeviceStats, PoolStats, Stat

if TYPE_CHECKING:
    from torchmem.simulator.expandable_segments import ExpandableSegment

ADDRESS_BITS = 48
"""A CUDA address fits: size, age and address together sort as one integer, which is cheaper than a tuple."""
SIZE_SHIFT = ADDRESS_BITS + 32
"""2^32 segments may come before the age of a segment reaches into its blocks' size."""
LONGEST_RUN = 2048
"""A longer run of sorted keys is cut in two: no insertion moves more keys than this."""


@dataclass(slots=True, eq=False)
class FreeBlocks:
    """Free blocks of one pool and one stream: `runs` of sorted keys, with the `last` key of each run."""

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
        if len(run) > LONGEST_RUN:
            self._cut(index)

    def erase(self, block: Block) -> None:
        """Remove a block that is in here, with the size and address under which it came in."""
        key = block.size << SIZE_SHIFT | block.registration_counter << ADDRESS_BITS | block.address
        index = bisect_left(self.last, key)
        self._pop(index, bisect_left(self.runs[index], key))

    def pop_best_fit(self, size: int) -> Block | None:
        """Remove and return the smallest block that holds `size` bytes, that of the oldest segment among equals."""
        key = size << SIZE_SHIFT
        index = bisect_left(self.last, key)
        if index == len(self.last):
            return None
        return self._pop(index, bisect_left(self.runs[index], key))

    def at_least(self, size: int) -> Iterator[Block]:
        """The blocks that hold `size` bytes, the best fit first; they must not change meanwhile."""
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
        """Add the largest key of all."""
        if not self.last or len(self.runs[-1]) == LONGEST_RUN:
            self.runs.append([key])
            self.last.append(key)
        else:
            self.runs[-1].append(key)
            self.last[-1] = key

    def _cut(self, index: int) -> None:
        run, half = self.runs[index], LONGEST_RUN // 2
        self.runs[index : index + 1] = [run[:half], run[half:]]
        self.last.insert(index, run[half - 1])


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
        return (
            (reserved,)
            if self.owner is None
            else (reserved, self.owner.reserved_bytes(is_small=self.is_small))
        )

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


UNLIMITED = (1 << 64) - 1
"""`max_split_size` when none is set."""


@dataclass(frozen=True, slots=True)
class AllocParams:
    """One request: its size as asked for and rounded, its stream and pool, and the segment it would need, in bytes."""

    orig_size: int
    size: int
    stream: int
    pool: BlockPool
    alloc_size: int
    is_expandable_segments_active: bool


def get_free_block(params: AllocParams, config: AllocatorConfig) -> Block | None:
    """Take the free block that serves the request; None when a new segment is needed.

    Only one candidate is held against the rules on oversize blocks: after a refusal nothing else is tried.
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
    """Whether the part of the block that a request of `size` bytes does not need becomes a free block."""
    pool, remaining = block.pool, block.size - size
    if pool.owner is not None and pool.owner.no_split:
        return False
    if pool.is_small or is_expandable_segments_active:
        return remaining >= MIN_BLOCK_SIZE
    return remaining > SMALL_SIZE and size < max_split_size


def _least_expandable(block: Block, candidates: Iterator[Block]) -> Block:
    """The best fit when a block counts with the free address space behind it, as in `get_free_block`."""
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


StreamFilter = Callable[[int], bool]


@dataclass(slots=True, eq=False)
class PrivatePool:
    """One private pool: its own free lists, and how many users it has.

    `use_count` is 1 for its `MemPool` and 1 more for each `use_mem_pool` block that is open; at 0 its cached memory
    may be given back. A pool with its own allocator (`MemPool(allocator)`) is not simulated.
    """

    id: PoolId
    stats: DeviceStats
    small_blocks: BlockPool
    large_blocks: BlockPool
    use_on_oom: bool = False
    no_split: bool = False
    use_count: int = 1

    def blocks(self, size: int) -> BlockPool:
        """The free blocks for a request of this rounded size."""
        return self.small_blocks if size <= SMALL_SIZE else self.large_blocks

    def reserved_bytes(self, *, is_small: bool) -> Stat:
        """The statistic of this pool that a segment of small or large blocks counts in."""
        reserved = self.stats.reserved_bytes_of(self.id)
        return reserved.small_pool if is_small else reserved.large_pool


@dataclass(slots=True, eq=False)
class PrivatePools:
    """All private pools of one device, and which requests go to them now."""

    stats: DeviceStats
    graph_pools: dict[PoolId, PrivatePool] = field(default_factory=dict)
    freeable: dict[PoolId, PrivatePool] = field(default_factory=dict)
    routes: list[tuple[PoolId, StreamFilter]] = field(default_factory=list)

    def create_or_incref_pool(
        self, pool_id: PoolId, *, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        """Create the pool with one user, or count one user more."""
        pool = self.graph_pools.get(pool_id)
        if pool is not None:
            pool.use_count += 1
            return
        stats = self.stats
        small = BlockPool(is_small=True, stats=stats.of_pool(is_small=True))
        large = BlockPool(is_small=False, stats=stats.of_pool(is_small=False))
        pool = PrivatePool(pool_id, stats, small, large, use_on_oom=use_on_oom, no_split=no_split)
        small.owner = large.owner = self.graph_pools[pool_id] = pool

    def begin_allocate_to_pool(self, pool_id: PoolId, accepts: StreamFilter) -> None:
        """Send requests on the streams that `accepts` names to the pool, and count one user more."""
        if any(pool_id == routed for routed, _ in self.routes):
            raise ValueError(f"beginAllocateToPool: already recording to mempool_id {pool_id}")
        self.create_or_incref_pool(pool_id)
        self.routes.append((pool_id, accepts))

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Send requests to the pool no longer; its count of users stays until `release_pool`."""
        remaining = [route for route in self.routes if route[0] != pool_id]
        if len(remaining) == len(self.routes):
            raise ValueError(f"endAllocatePool: not currently recording to mempool_id {pool_id}")
        self.routes = remaining

    def release_pool(self, pool_id: PoolId) -> None:
        """Count one user less; without a user its cached memory may be given back."""
        pool = self.graph_pools[pool_id]
        pool.use_count -= 1
        if pool.use_count == 0:
            pool.use_on_oom = False
            self.freeable[pool_id] = pool

    def use_on_oom(self) -> list[PrivatePool]:
        """The pools whose free blocks serve other requests when the driver refuses, the oldest first.

        With several of them PyTorch takes the order of a hash of their ids, which is not reproduced.
        """
        return [pool for pool in self.graph_pools.values() if pool.use_on_oom]

    def unused(self, pool_id: PoolId) -> list[PrivatePool]:
        """The pools without a user, or the one with this id if it has none."""
        return [pool for pool in self.freeable.values() if pool_id in (DEFAULT_POOL, pool.id)]

    def forget_if_empty(self, pool: PrivatePool) -> None:
        """Drop a pool that nobody uses if it holds no memory any more; its statistics stay.

        With expandable segments PyTorch 2.13 miscounts what such a pool holds: it may drop the pool, or abort, while
        blocks of it are in use. Here the pool stays until the last of them is gone.
        """
        reserved = self.stats.reserved_bytes_by_private_pools.get(pool.id)
        if reserved is None or not reserved.current:
            del self.graph_pools[pool.id], self.freeable[pool.id]

    def get_pool(self, size: int, stream: int) -> BlockPool | None:
        """The private pool that a request goes to, the one routed last if several claim it; None for the default."""
        for pool_id, accepts in reversed(self.routes):
            if accepts(stream):
                return self.graph_pools[pool_id].blocks(size)
        return None

    def free_blocks(self) -> Iterator[Block]:
        """The free blocks of all pools."""
        for pool in self.graph_pools.values():
            yield from pool.small_blocks
            yield from pool.large_blocks
