"""Fragmentation arithmetic on a memory snapshot: free bytes, what pins them, the largest request that still fits.

Only the default pools count; memory of CUDA graphs and MemPools is not usable by eager code and is reported apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from torchmem.allocator.headroom import (
    AvailableMemory,
    CachedFree,
    growing_ends,
    headroom,
    returnable_bytes,
)
from torchmem.allocator.settings import DEFAULT_CONFIG, AllocatorConfig
from torchmem.allocator.sizes import SMALL_BUFFER
from torchmem.allocator.snapshot import DEFAULT_POOL, BlockInfo, SegmentInfo
from torchmem.sample.sample import FREE_BLOCK_BOUNDS, BlockCounts, ByPool, Layout


@dataclass(slots=True)
class _PoolTally:
    """Numbers of segments and blocks of the small or the large pool of one device."""

    segments: int = 0
    blocks: int = 0
    pending: int = 0
    free: int = 0


@dataclass(slots=True)
class _Tally:
    """Running sums over the blocks of one device; `ranges` are the expandable segments of the large pool by stream."""

    large_page: int
    small: _PoolTally = field(default_factory=_PoolTally)
    large: _PoolTally = field(default_factory=_PoolTally)
    free_sizes: list[int] = field(default_factory=list)
    releasable_bytes: int = 0
    largest_by_stream: dict[tuple[str, int], int] = field(default_factory=dict)
    reserved_by_stream: dict[int, int] = field(default_factory=dict)
    private_used_bytes: int = 0
    private_free_bytes: int = 0
    has_expandable: bool = False
    ranges: dict[int, list[SegmentInfo]] = field(default_factory=dict)


def measure(
    segments: Iterable[SegmentInfo],
    device: int,
    timestamp: float,
    available: AvailableMemory | None = None,
    config: AllocatorConfig = DEFAULT_CONFIG,
) -> Layout:
    """Measure the default pools of one device.

    `segments` is the whole snapshot, `device` torch's index, `timestamp` Unix seconds, `config` the settings in
    effect. Without `room` the headroom stays unknown.
    """
    tally = _Tally(config.large_segment_size)
    for segment in segments:
        if segment["device"] == device:
            _add_segment(tally, segment)
    small, large = tally.small, tally.large
    return Layout(
        timestamp=timestamp,
        segments=ByPool(small.segments, large.segments),
        blocks=BlockCounts(
            active_allocated=ByPool(
                small.blocks - small.pending - small.free, large.blocks - large.pending - large.free
            ),
            active_pending_free=ByPool(small.pending, large.pending),
            inactive=ByPool(small.free, large.free),
        ),
        releasable_bytes=tally.releasable_bytes,
        stranded_bytes=sum(tally.free_sizes) - tally.releasable_bytes,
        largest_free_block_bytes=max(tally.free_sizes, default=0),
        free_block_counts=_histogram(tally.free_sizes),
        private_used_bytes=tally.private_used_bytes,
        private_free_bytes=tally.private_free_bytes,
        headroom_bytes=_headroom(tally, available, config, flush=False),
        headroom_flush_bytes=_headroom(tally, available, config, flush=True),
    )


def _histogram(sizes: list[int]) -> tuple[int, ...]:
    counts = [0] * (len(FREE_BLOCK_BOUNDS) + 1)
    for size in sizes:
        counts[bisect_left(FREE_BLOCK_BOUNDS, size)] += 1
    return tuple(counts)


def _add_segment(tally: _Tally, segment: SegmentInfo) -> None:
    if segment["segment_pool_id"] != DEFAULT_POOL:
        tally.private_used_bytes += segment["active_size"]
        tally.private_free_bytes += segment["total_size"] - segment["active_size"]
        return
    pool = tally.small if segment["segment_type"] == "small" else tally.large
    stream = segment["stream"]
    tally.reserved_by_stream[stream] = (
        tally.reserved_by_stream.get(stream, 0) + segment["total_size"]
    )
    free = _count_blocks(pool, segment["blocks"])
    if free:
        _add_free_blocks(tally, segment, free)
    if segment["is_expandable"]:
        tally.has_expandable = True
        if segment["segment_type"] == "large":
            tally.ranges.setdefault(stream, []).append(segment)


def _count_blocks(pool: _PoolTally, blocks: list[BlockInfo]) -> list[int]:
    """Count the blocks of one segment by state; returns the sizes of the free ones."""
    free = []
    for block in blocks:  # up to 10^5 of them in a snapshot: the one loop here whose speed matters
        state = block["state"]
        if state == "inactive":
            free.append(block["size"])
        elif state == "active_pending_free":
            pool.pending += 1
    pool.segments += 1
    pool.blocks += len(blocks)
    pool.free += len(free)
    return free


def _add_free_blocks(tally: _Tally, segment: SegmentInfo, sizes: list[int]) -> None:
    tally.free_sizes += sizes
    key = segment["segment_type"], segment["stream"]
    tally.largest_by_stream[key] = max(tally.largest_by_stream.get(key, 0), *sizes)
    if segment["is_expandable"]:
        page = SMALL_BUFFER if segment["segment_type"] == "small" else tally.large_page
        tally.releasable_bytes += returnable_bytes(segment, page)
    elif sizes[0] == segment["total_size"]:
        tally.releasable_bytes += sizes[0]


def main_stream(reserved_by_stream: dict[int, int]) -> int:
    """The stream whose headroom is reported: the default stream if it holds memory, else the one that holds most."""
    if 0 in reserved_by_stream or not reserved_by_stream:
        return 0
    return max(reserved_by_stream, key=lambda stream: reserved_by_stream[stream])


def _headroom(
    tally: _Tally, available: AvailableMemory | None, config: AllocatorConfig, *, flush: bool
) -> int | None:
    """On the main stream; None when room or settings are unknown, or expandable segments were switched off again."""
    if (
        available is None
        or not config.known
        or (tally.has_expandable and not config.expandable_segments)
    ):
        return None
    stream = main_stream(tally.reserved_by_stream)
    ranges = sorted(tally.ranges.get(stream, []), key=itemgetter("address"))
    ends = tuple(growing_ends(ranges, config.large_segment_size))
    small, large = (tally.largest_by_stream.get((pool, stream), 0) for pool in ("small", "large"))
    return headroom(
        CachedFree(small, large, tally.releasable_bytes, ends), available, config, flush=flush
    )
