"""Measure a memory snapshot: free bytes, what pins them, and the largest request that fits.

Only the default pools count. Eager code cannot use the memory of CUDA graphs and MemPools, which is
reported separately.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter

from torchmem.allocator.headroom import (
    AvailableMemory,
    CachedFree,
    headroom,
    range_ends,
    returnable_bytes,
)
from torchmem.allocator.settings import DEFAULT_CONFIG, AllocatorConfig
from torchmem.allocator.sizes import SMALL_BUFFER
from torchmem.allocator.snapshot import DEFAULT_POOL, BlockInfo, BlockState, SegmentInfo
from torchmem.sample.sample import FREE_BLOCK_BOUNDS, BlockCounts, ByPool, Layout


@dataclass(slots=True)
class _PoolCounts:
    """Numbers of segments and blocks in the small or the large pool of one device."""

    segments: int = 0
    blocks: int = 0
    pending: int = 0
    free: int = 0

    @property
    def allocated(self) -> int:
        """Number of blocks that hold a tensor."""
        return self.blocks - self.pending - self.free


@dataclass(slots=True)
class _DeviceTotals:
    """Running totals over the blocks of one device.

    `ranges` holds the mapped ranges of expandable segments in the large pool, by stream. A flush
    waits for all streams first; `flushed_ranges` are the ranges and `flushed_bytes` the bytes that
    can be released after that.
    """

    large_page: int
    reserved_bytes: int = 0
    small: _PoolCounts = field(default_factory=_PoolCounts)
    large: _PoolCounts = field(default_factory=_PoolCounts)
    free_sizes: list[int] = field(default_factory=list)
    largest_allocated: int = 0
    pending_bytes: int = 0
    releasable_bytes: int = 0
    flushed_bytes: int = 0
    largest_by_stream: dict[tuple[str, int], int] = field(default_factory=dict)
    reserved_by_stream: dict[int, int] = field(default_factory=dict)
    private_used_bytes: int = 0
    private_free_bytes: int = 0
    has_expandable: bool = False
    ranges: dict[int, list[SegmentInfo]] = field(default_factory=dict)
    flushed_ranges: dict[int, list[SegmentInfo]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The layout of one device in a snapshot, and what is needed for the headroom at a later time.

    `reserved_bytes` covers all pools. `cached` is the free memory for requests on the main
    stream, and `flushed` is the same after a flush.
    """

    layout: Layout
    reserved_bytes: int
    cached: CachedFree
    flushed: CachedFree
    config: AllocatorConfig


def measure(
    segments: Iterable[SegmentInfo],
    device: int,
    timestamp: float,
    available: AvailableMemory | None = None,
    config: AllocatorConfig = DEFAULT_CONFIG,
) -> Layout:
    """Return the layout of the default pools of one device; the arguments are `measurement`'s."""
    return measurement(segments, device, timestamp, available, config).layout


def measurement(
    segments: Iterable[SegmentInfo],
    device: int,
    timestamp: float,
    available: AvailableMemory | None = None,
    config: AllocatorConfig = DEFAULT_CONFIG,
) -> Measurement:
    """Measure one device.

    Args:
        segments: the whole snapshot.
        device: torch's index of the device.
        timestamp: time of the snapshot, in Unix seconds.
        available: memory left at the driver; if None, the headroom is unknown.
        config: allocator settings in effect.
    """
    totals = _DeviceTotals(config.large_segment_size)
    for segment in segments:
        if segment["device"] == device:
            _add_segment(totals, segment)
    cached, flushed = (_cached_free(totals, config, flush=flush) for flush in (False, True))
    layout = _layout(totals, timestamp)
    # Once the setting is off, free blocks of expandable segments serve no request
    # (`get_free_block`).
    was_disabled = totals.has_expandable and not config.expandable_segments
    if available is not None and config.known and not was_disabled:
        layout = replace(
            layout,
            headroom_bytes=headroom(cached, available, config, flush=False),
            headroom_flush_bytes=headroom(flushed, available, config, flush=True),
        )
    return Measurement(layout, totals.reserved_bytes, cached, flushed, config)


def _layout(totals: _DeviceTotals, timestamp: float) -> Layout:
    """Return the layout without the headroom."""
    return Layout(
        timestamp=timestamp,
        segments=ByPool(totals.small.segments, totals.large.segments),
        blocks=_block_counts(totals.small, totals.large),
        releasable_bytes=totals.releasable_bytes,
        stranded_bytes=sum(totals.free_sizes) - totals.releasable_bytes,
        largest_free_block_bytes=max(totals.free_sizes, default=0),
        free_block_counts=_histogram(totals.free_sizes),
        private_used_bytes=totals.private_used_bytes,
        private_free_bytes=totals.private_free_bytes,
        headroom_bytes=None,
        headroom_flush_bytes=None,
        pending_free_bytes=totals.pending_bytes,
        largest_allocated_block_bytes=totals.largest_allocated,
        in_use_bytes=totals.reserved_bytes - sum(totals.free_sizes) - totals.private_free_bytes,
    )


def _block_counts(small: _PoolCounts, large: _PoolCounts) -> BlockCounts:
    return BlockCounts(
        active_allocated=ByPool(small.allocated, large.allocated),
        active_pending_free=ByPool(small.pending, large.pending),
        inactive=ByPool(small.free, large.free),
    )


def _histogram(sizes: list[int]) -> tuple[int, ...]:
    counts = [0] * (len(FREE_BLOCK_BOUNDS) + 1)
    for size in sizes:
        counts[bisect_left(FREE_BLOCK_BOUNDS, size)] += 1
    return tuple(counts)


def _add_segment(totals: _DeviceTotals, segment: SegmentInfo) -> None:
    totals.reserved_bytes += segment["total_size"]
    if segment["segment_pool_id"] != DEFAULT_POOL:
        totals.private_used_bytes += segment["active_size"]
        totals.private_free_bytes += segment["total_size"] - segment["active_size"]
        return
    pool = totals.small if segment["segment_type"] == "small" else totals.large
    stream = segment["stream"]
    reserved = totals.reserved_by_stream.get(stream, 0)
    totals.reserved_by_stream[stream] = reserved + segment["total_size"]
    free, pending, largest = _count_blocks(pool, segment["blocks"])
    if free:
        _add_free_blocks(totals, segment, free)
    synchronized = _synchronized(segment) if pending else segment
    releasable = _releasable_bytes(segment, totals.large_page) if free else 0
    totals.largest_allocated = max(totals.largest_allocated, largest)
    totals.pending_bytes += pending
    totals.releasable_bytes += releasable
    totals.flushed_bytes += (
        _releasable_bytes(synchronized, totals.large_page) if pending else releasable
    )
    if segment["is_expandable"]:
        totals.has_expandable = True
        if segment["segment_type"] == "large":
            totals.ranges.setdefault(stream, []).append(segment)
            totals.flushed_ranges.setdefault(stream, []).append(synchronized)


def _count_blocks(pool: _PoolCounts, blocks: list[BlockInfo]) -> tuple[list[int], int, int]:
    """Count the blocks of one segment by state.

    Return the sizes of the free ones, the bytes of those that wait for another stream, and the size
    of the largest that holds a tensor.
    """
    free, pending, largest = [], 0, 0
    for block in blocks:  # kept fast, as a snapshot has up to 10^5 blocks
        state = block["state"]
        if state == "inactive":
            free.append(block["size"])
        elif state == "active_pending_free":
            pool.pending += 1
            pending += block["size"]
        elif block["size"] > largest:
            largest = block["size"]
    pool.segments += 1
    pool.blocks += len(blocks)
    pool.free += len(free)
    return free, pending, largest


def _add_free_blocks(totals: _DeviceTotals, segment: SegmentInfo, sizes: list[int]) -> None:
    totals.free_sizes += sizes
    key = segment["segment_type"], segment["stream"]
    totals.largest_by_stream[key] = max(totals.largest_by_stream.get(key, 0), *sizes)


def _releasable_bytes(segment: SegmentInfo, large_page: int) -> int:
    """Return the bytes of a segment that releasing the cache returns to the driver."""
    if segment["is_expandable"]:
        page = SMALL_BUFFER if segment["segment_type"] == "small" else large_page
        return returnable_bytes(segment, page)
    first = segment["blocks"][0]
    is_whole = first["state"] == "inactive" and first["size"] == segment["total_size"]
    return first["size"] if is_whole else 0


def _synchronized(segment: SegmentInfo) -> SegmentInfo:
    """Return a segment as it is once the streams that its blocks wait for have finished."""
    blocks: list[BlockInfo] = []
    for block in segment["blocks"]:
        is_free = block["state"] != "active_allocated"
        if is_free and blocks and blocks[-1]["state"] == "inactive":
            blocks[-1]["size"] += block["size"]
        else:
            state: BlockState = "inactive" if is_free else "active_allocated"
            blocks.append({**block, "state": state})
    return {**segment, "blocks": blocks}


def main_stream(reserved_by_stream: dict[int, int]) -> int:
    """Return the stream whose headroom is reported.

    It is the default stream if it holds memory, else the stream that holds most.
    """
    if 0 in reserved_by_stream or not reserved_by_stream:
        return 0
    return max(reserved_by_stream, key=lambda stream: reserved_by_stream[stream])


def _cached_free(totals: _DeviceTotals, config: AllocatorConfig, *, flush: bool) -> CachedFree:
    """Return the free memory for requests on the main stream, now or after a flush.

    Blocks that wait for another stream count as in use, but a flush waits for them: what they make
    releasable goes to the driver. A block that the flush frees beside a live one serves no request,
    because the allocator does not search again (up to PyTorch 2.15, pytorch/pytorch#189504).
    """
    stream = main_stream(totals.reserved_by_stream)
    by_stream = totals.flushed_ranges if flush else totals.ranges
    ranges = sorted(by_stream.get(stream, []), key=itemgetter("address"))
    ends = tuple(range_ends(ranges, config.large_segment_size))
    small, large = (totals.largest_by_stream.get((pool, stream), 0) for pool in ("small", "large"))
    releasable = totals.flushed_bytes if flush else totals.releasable_bytes
    return CachedFree(small, large, releasable, ends)
