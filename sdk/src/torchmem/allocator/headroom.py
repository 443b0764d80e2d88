"""Expandable segments: what their free blocks could return, and where and from what on they can grow.

An expandable segment is an address range of which pages are mapped; a snapshot shows each contiguous mapped range as a
segment of its own, gaps only as holes between the addresses. c10/cuda/CUDACachingAllocator.cpp,
`find_expandable_block` and `unmap_block`, PyTorch 2.13. All sizes are bytes.

Headroom: the largest single request that the allocator can serve now.

Algorithm: `DeviceCachingAllocator::malloc` in c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13. Success is not
monotone in size, so this is the largest request that succeeds; with 12 MiB left one of 5 MiB may fail. All sizes are
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_BUFFER, SMALL_SIZE
from torchmem.allocator.snapshot import SegmentInfo


@dataclass(frozen=True, slots=True)
class GrowingEnd:
    """The end of a mapped range, with the unmapped gap behind it.

    `space`: length of the free and unmapped addresses there, unlimited behind the last range; `free`, `free_flushed`:
    how much of its beginning is mapped already, now and after a flush.
    """

    space: float
    free: int
    free_flushed: int


def full_pages(offset: int, size: int, page: int) -> int:
    """Bytes of the pages that lie fully inside a free block at `offset` of an expandable segment."""
    first = -(-offset // page) * page
    last = (offset + size) // page * page
    return max(0, last - first)


def returnable_bytes(segment: SegmentInfo, page: int) -> int:
    """What a flush returns of an expandable segment: the pages that lie fully inside free blocks."""
    start, blocks = segment["address"], segment["blocks"]
    return sum(
        full_pages(b["address"] - start, b["size"], page)
        for b in blocks
        if b["state"] == "inactive"
    )


def growing_ends(ranges: Sequence[SegmentInfo], page: int) -> Iterator[GrowingEnd]:
    """The end of each range of one pool and stream, `ranges` in the order of their addresses."""
    for this, following in zip_longest(ranges, ranges[1:]):
        last = this["blocks"][-1]
        free = last["size"] if last["state"] == "inactive" else 0
        flushed = min(free, -(last["address"] - this["address"]) % page)
        yield GrowingEnd(_space(this, following, free), free, flushed)


def _space(this: SegmentInfo, following: SegmentInfo | None, free: int) -> float:
    if following is None:
        return math.inf
    head = following["blocks"][0]
    gap = following["address"] - this["address"] - this["total_size"]
    return free + gap + (head["size"] if head["state"] == "inactive" else 0)


def grown_request(ends: Sequence[GrowingEnd], obtainable: int, page: int, *, flush: bool) -> int:
    """Largest request that new pages can serve when the driver can give `obtainable` bytes.

    The allocator takes the first gap that is long enough, so the least that any such gap begins with counts. A gap
    before the first range is invisible and taken not to exist.
    """
    pages = max(0, obtainable) // page * page
    begun = [end.free_flushed if flush else end.free for end in ends if end.space >= pages]
    return pages + min(begun, default=0)


@dataclass(frozen=True, slots=True)
class AvailableMemory:
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


@dataclass(frozen=True, slots=True)
class CachedFree:
    """What is free in the cache for one stream: its largest blocks, and what a flush returns of all streams.

    `ends`: where its expandable segments of the large pool can grow.
    """

    largest_small: int
    largest_large: int
    releasable: int
    ends: tuple[GrowingEnd, ...] = ()


def headroom(
    cached: CachedFree, available: AvailableMemory, config: AllocatorConfig, *, flush: bool
) -> int:
    """Largest request that succeeds without, or with, the allocator's retry flush.

    The largest of what a cached block of the small pool serves, one of the large pool, and the driver. Exact for
    cudaMalloc'ed segments, except that blocks which max_split_size_mb or garbage_collection_threshold would free before
    a flush do not count without one. With expandable segments unmapped gaps are invisible: right to about one page.
    With throw_on_cudamalloc_oom requests are refused before the flush, so it counts for nothing.
    """
    flush = flush and not config.throw_on_cudamalloc_oom
    small = config.largest_request(min(cached.largest_small, SMALL_SIZE))
    return max(
        small,
        _from_block(cached.largest_large, config),
        _from_driver(cached, available, config, flush=flush),
    )


def _from_block(block: int, config: AllocatorConfig) -> int:
    request = config.largest_request(block)
    return request if request > SMALL_SIZE and config.may_use(block, request) else 0


def _from_driver(
    cached: CachedFree, available: AvailableMemory, config: AllocatorConfig, *, flush: bool
) -> int:
    returned = cached.releasable if flush else 0
    new_segment = segment_request(available.obtainable(returned), config)
    if not config.expandable_segments:
        return new_segment
    pages = grown_request(
        cached.ends, available.driver_free + returned, config.large_segment_size, flush=flush
    )
    grown = config.largest_request(pages)
    if available.limit is not None:
        # It is held against the whole request, though the beginning may be mapped already.
        grown = min(grown, segment_request(available.limit - available.reserved + returned, config))
    return grown if grown > SMALL_SIZE else min(new_segment, SMALL_SIZE)


def segment_request(obtainable: int, config: AllocatorConfig) -> int:
    """Largest request that a new segment can serve when cudaMalloc can give `obtainable` bytes."""
    request = config.largest_request(obtainable // ROUND_LARGE * ROUND_LARGE)
    if obtainable >= config.large_segment_size or request >= MIN_LARGE_ALLOC:
        return request
    return SMALL_SIZE if obtainable >= SMALL_BUFFER else 0
