"""Headroom: the largest single request that the allocator can serve now.

Algorithm: `DeviceCachingAllocator::malloc` in c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13.
Success is not monotone in size, so this is the largest request that succeeds; with 12 MiB left, a
request of 5 MiB may fail. All sizes are in bytes.

An expandable segment is an address range in which pages are mapped (`find_expandable_block` and
`unmap_block` in the same file). A snapshot shows each contiguous mapped range as a segment of its
own, and the gaps only as holes between addresses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_BUFFER, SMALL_SIZE
from torchmem.allocator.snapshot import SegmentInfo


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Memory that the allocator can still get from the driver, in bytes.

    `driver_free` is from cudaMemGetInfo. `limit` is the memory fraction's limit, which applies to
    `reserved`, the reserved bytes of all pools.
    """

    driver_free: int
    reserved: int = 0
    limit: int | None = None

    def obtainable(self, returned: int) -> int:
        """Return what cudaMalloc can give once `returned` cached bytes are back at the driver."""
        if self.limit is None:
            return self.driver_free + returned
        return min(self.driver_free, self.limit - self.reserved) + returned


@dataclass(frozen=True, slots=True)
class RangeEnd:
    """The end of a mapped range of an expandable segment, and the unmapped gap behind it.

    `space` is the length of the free and unmapped addresses there, infinite behind the last range.
    `free` and `free_flushed` are the mapped bytes at its start, now and after a flush.
    """

    space: float
    free: int
    free_flushed: int


@dataclass(frozen=True, slots=True)
class CachedFree:
    """Free memory in the cache, for requests on one stream, in bytes.

    `releasable` is what a flush returns, over all streams. `ends` are the ends of the ranges where
    the stream's expandable segments in the large pool can grow.
    """

    largest_small: int
    largest_large: int
    releasable: int
    ends: tuple[RangeEnd, ...] = ()

    def after(self, returned: int, free: int) -> CachedFree:
        """Return the part of it that is certainly left later.

        Since then `returned` bytes have gone to the driver, and at most `free` bytes are free.
        """

        def left(size: int) -> int:
            return max(0, min(free, size - returned))

        return CachedFree(
            left(self.largest_small),
            left(self.largest_large),
            left(self.releasable),
            tuple(replace(end, free=left(end.free)) for end in self.ends),
        )


def headroom(
    cached: CachedFree, available: AvailableMemory, config: AllocatorConfig, *, flush: bool
) -> int:
    """Return the largest request that succeeds, without or with the flush before a retry.

    It is the largest that a cached block of the small pool, one of the large pool, or the driver
    can serve. The result is exact for cudaMalloc'ed segments, except that without a flush it does
    not count the blocks that max_split_size_mb or garbage_collection_threshold would free earlier.
    With expandable segments, unmapped gaps are invisible, and the result is accurate to about one
    page. With throw_on_cudamalloc_oom, requests are rejected before the flush, so it has no effect.
    """
    flush = flush and not config.throw_on_cudamalloc_oom
    return max(
        config.largest_request(min(cached.largest_small, SMALL_SIZE)),
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
    pages = _grown_request(
        cached.ends, available.driver_free + returned, config.large_segment_size, flush=flush
    )
    grown = config.largest_request(pages)
    if available.limit is not None:
        # The limit applies to the whole request, although its start may be mapped already.
        below_limit = available.limit - available.reserved + returned
        grown = min(grown, segment_request(below_limit, config))
    # A small request grows a range of its own pool, by pages of 2 MiB.
    return grown if grown > SMALL_SIZE else min(new_segment, SMALL_SIZE)


def segment_request(obtainable: int, config: AllocatorConfig) -> int:
    """Return the largest request that a new segment serves if cudaMalloc gives `obtainable`."""
    request = config.largest_request(obtainable // ROUND_LARGE * ROUND_LARGE)
    if obtainable >= config.large_segment_size or request >= MIN_LARGE_ALLOC:
        return request
    return SMALL_SIZE if obtainable >= SMALL_BUFFER else 0


def _grown_request(ends: Sequence[RangeEnd], obtainable: int, page: int, *, flush: bool) -> int:
    """Return the largest request that new pages serve when the driver can give `obtainable` bytes.

    The allocator takes the first gap that is long enough, so the smallest free start of all such
    gaps counts. A gap before the first range is invisible and assumed not to exist.
    """
    pages = max(0, obtainable) // page * page
    begun = [end.free_flushed if flush else end.free for end in ends if end.space >= pages]
    return pages + min(begun, default=0)


def range_ends(ranges: Sequence[SegmentInfo], page: int) -> Iterator[RangeEnd]:
    """Yield the end of each range of one pool and stream; `ranges` are ordered by address."""
    for this, following in zip_longest(ranges, ranges[1:]):
        last = this["blocks"][-1]
        free = last["size"] if last["state"] == "inactive" else 0
        # A flush unmaps whole pages, so only the bytes before the first of them stay.
        flushed = min(free, -(last["address"] - this["address"]) % page)
        yield RangeEnd(_space(this, following, free), free, flushed)


def _space(this: SegmentInfo, following: SegmentInfo | None, free: int) -> float:
    if following is None:
        return math.inf
    head = following["blocks"][0]
    gap = following["address"] - this["address"] - this["total_size"]
    return free + gap + (head["size"] if head["state"] == "inactive" else 0)


def returnable_bytes(segment: SegmentInfo, page: int) -> int:
    """Return what a flush releases from an expandable segment: full pages in its free blocks."""
    start, blocks = segment["address"], segment["blocks"]
    return sum(
        full_pages(block["address"] - start, block["size"], page)
        for block in blocks
        if block["state"] == "inactive"
    )


def full_pages(offset: int, size: int, page: int) -> int:
    """Return the bytes of the pages that lie fully in a block at `offset` of a segment."""
    first = -(-offset // page) * page
    last = (offset + size) // page * page
    return max(0, last - first)
