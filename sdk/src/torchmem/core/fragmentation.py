"""Fragmentation arithmetic on a memory snapshot: free bytes, what pins them, the largest request that still fits.

Only the default pools count; memory of CUDA graphs and MemPools is not usable by eager code and is reported apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchmem.core.sample import FREE_BLOCK_BOUNDS, BlockCounts, ByPool, Layout
from torchmem.core.sizes import LARGE_BUFFER, MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_BUFFER, SMALL_SIZE
from torchmem.core.snapshot import DEFAULT_POOL, BlockInfo, SegmentInfo


@dataclass(slots=True)
class _Tally:
    """Running sums over the blocks of one device; `blocks` counts by pool, then by state."""

    segments: dict[str, int] = field(default_factory=lambda: {"small": 0, "large": 0})
    blocks: dict[str, Counter[str]] = field(default_factory=lambda: {"small": Counter(), "large": Counter()})
    free_sizes: list[int] = field(default_factory=list)
    releasable_bytes: int = 0
    largest_by_stream: dict[tuple[str, int], int] = field(default_factory=dict)
    reserved_by_stream: dict[int, int] = field(default_factory=dict)
    private_used_bytes: int = 0
    private_free_bytes: int = 0
    tail_by_stream: dict[int, tuple[int, int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Room:
    """Where the allocator can still grow, in bytes.

    `driver_free`: cudaMemGetInfo; `limit`: the memory fraction's limit, counted against `reserved` of all pools.
    """

    driver_free: int
    reserved: int = 0
    limit: int | None = None

    def obtainable(self, returned: int) -> int:
        """Bytes that cudaMalloc can give once `returned` cached bytes have gone back to the driver."""
        if self.limit is None:
            return self.driver_free + returned
        return min(self.driver_free, self.limit - self.reserved) + returned


def measure(segments: Iterable[SegmentInfo], device: int, timestamp: float, room: Room | None = None) -> Layout:
    """Measure the default pools of one device.

    `segments` is the whole snapshot, `device` torch's index, `timestamp` Unix seconds. Without `room` the
    headroom stays unknown.
    """
    tally = _Tally()
    for segment in segments:
        if segment["device"] == device:
            _add_segment(tally, segment)
    return Layout(
        timestamp=timestamp,
        segments=ByPool(tally.segments["small"], tally.segments["large"]),
        blocks=BlockCounts(
            active_allocated=_blocks(tally, "active_allocated"),
            active_pending_free=_blocks(tally, "active_pending_free"),
            inactive=_blocks(tally, "inactive"),
        ),
        releasable_bytes=tally.releasable_bytes,
        stranded_bytes=sum(tally.free_sizes) - tally.releasable_bytes,
        largest_free_block_bytes=max(tally.largest_by_stream.values(), default=0),
        free_block_counts=_histogram(tally.free_sizes),
        private_used_bytes=tally.private_used_bytes,
        private_free_bytes=tally.private_free_bytes,
        headroom_bytes=None if room is None else _headroom(tally, room, flush=False),
        headroom_flush_bytes=None if room is None else _headroom(tally, room, flush=True),
    )


def _blocks(tally: _Tally, state: str) -> ByPool:
    return ByPool(tally.blocks["small"][state], tally.blocks["large"][state])


def _histogram(sizes: list[int]) -> tuple[int, ...]:
    counts = [0] * (len(FREE_BLOCK_BOUNDS) + 1)
    for size, count in Counter(sizes).items():
        counts[bisect_left(FREE_BLOCK_BOUNDS, size)] += count
    return tuple(counts)


def _add_segment(tally: _Tally, segment: SegmentInfo) -> None:
    if segment["segment_pool_id"] != DEFAULT_POOL:
        tally.private_used_bytes += segment["active_size"]
        tally.private_free_bytes += segment["total_size"] - segment["active_size"]
        return
    pool, stream, blocks = segment["segment_type"], segment["stream"], segment["blocks"]
    tally.segments[pool] += 1
    tally.reserved_by_stream[stream] = tally.reserved_by_stream.get(stream, 0) + segment["total_size"]
    states = tally.blocks[pool]
    free = []
    for block in blocks:  # up to 10^5 in all: nothing else in this file is worth its speed
        state = block["state"]
        states[state] += 1
        if state == "inactive":
            free.append(block)
    if free:
        _add_free_blocks(tally, segment, free)


def _add_free_blocks(tally: _Tally, segment: SegmentInfo, free: list[BlockInfo]) -> None:
    pool, stream = segment["segment_type"], segment["stream"]
    sizes = [block["size"] for block in free]
    tally.free_sizes += sizes
    tally.largest_by_stream[pool, stream] = max(*sizes, tally.largest_by_stream.get((pool, stream), 0))
    if segment["is_expandable"]:
        for block in free:
            _add_pages(tally, segment, block)
    elif sizes[0] == segment["total_size"]:
        tally.releasable_bytes += sizes[0]


def _add_pages(tally: _Tally, segment: SegmentInfo, block: BlockInfo) -> None:
    """A free block of an expandable segment: the full pages it could return, and whether it is the growing end."""
    pool, stream, size = segment["segment_type"], segment["stream"], block["size"]
    page = SMALL_BUFFER if pool == "small" else LARGE_BUFFER
    offset = block["address"] - segment["address"]
    tally.releasable_bytes += full_pages(offset, size, page)
    ends_segment = offset + size == segment["total_size"]
    if pool == "large" and ends_segment and block["address"] > tally.tail_by_stream.get(stream, (-1, 0, 0))[0]:
        tally.tail_by_stream[stream] = (block["address"], size, min(size, -offset % page))


def full_pages(offset: int, size: int, page: int) -> int:
    """Bytes of the pages that lie fully inside a free block at `offset` of an expandable segment."""
    first = -(-offset // page) * page
    last = (offset + size) // page * page
    return max(0, last - first)


def main_stream(reserved_by_stream: dict[int, int]) -> int:
    """The stream whose headroom is reported: the default stream if it holds memory, else the one that holds most."""
    if 0 in reserved_by_stream or not reserved_by_stream:
        return 0
    return max(reserved_by_stream, key=lambda stream: reserved_by_stream[stream])


def _headroom(tally: _Tally, room: Room, *, flush: bool) -> int:
    """Largest single request on the main stream that succeeds now, without or with the allocator's retry flush.

    H = max(B, S, V): the largest free block of the large pool, of the small pool (at most kSmallSize), and what
    the driver can still give (`driver_path_bytes`). Exact for the default settings; with expandable segments the
    unmapped gaps are invisible, so it is right to about one page.
    """
    stream = main_stream(tally.reserved_by_stream)
    obtainable = room.obtainable(tally.releasable_bytes if flush else 0)
    large = tally.largest_by_stream.get(("large", stream), 0)
    small = min(tally.largest_by_stream.get(("small", stream), 0), SMALL_SIZE)
    if stream in tally.tail_by_stream:
        _, tail, tail_after_flush = tally.tail_by_stream[stream]
        pages = max(0, obtainable) // LARGE_BUFFER * LARGE_BUFFER
        return max(large, small, pages + (tail_after_flush if flush else tail))
    return max(large, small, driver_path_bytes(obtainable))


def driver_path_bytes(obtainable: int) -> int:
    """Largest request that a new segment can serve when cudaMalloc can give `obtainable` bytes."""
    if obtainable >= MIN_LARGE_ALLOC:
        return obtainable // ROUND_LARGE * ROUND_LARGE
    return SMALL_SIZE if obtainable >= SMALL_BUFFER else 0
