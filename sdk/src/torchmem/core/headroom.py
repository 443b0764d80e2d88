"""Headroom: the largest single request that the allocator can serve now.

Algorithm: `DeviceCachingAllocator::malloc` in c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13. Success is not
monotone in size, so this is the largest request that succeeds; with 12 MiB left one of 5 MiB may fail. All sizes are
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.core.allocator_config import AllocatorConfig
from torchmem.core.expandable import GrowingEnd, grown_request
from torchmem.core.sizes import MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_BUFFER, SMALL_SIZE


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


@dataclass(frozen=True, slots=True)
class CachedFree:
    """What is free in the cache for one stream: its largest blocks, and what a flush returns of all streams.

    `ends`: where its expandable segments of the large pool can grow.
    """

    largest_small: int
    largest_large: int
    releasable: int
    ends: tuple[GrowingEnd, ...] = ()


def headroom(cached: CachedFree, room: Room, config: AllocatorConfig, *, flush: bool) -> int:
    """Largest request that succeeds without, or with, the allocator's retry flush.

    The largest of what a cached block of the small pool serves, one of the large pool, and the driver. Exact for
    cudaMalloc'ed segments, except that blocks which max_split_size_mb or garbage_collection_threshold would free before
    a flush do not count without one. With expandable segments unmapped gaps are invisible: right to about one page.
    With throw_on_cudamalloc_oom requests are refused before the flush, so it counts for nothing.
    """
    flush = flush and not config.throw_on_cudamalloc_oom
    small = config.largest_request(min(cached.largest_small, SMALL_SIZE))
    return max(small, _from_block(cached.largest_large, config), _from_driver(cached, room, config, flush=flush))


def _from_block(block: int, config: AllocatorConfig) -> int:
    request = config.largest_request(block)
    return request if request > SMALL_SIZE and config.may_use(block, request) else 0


def _from_driver(cached: CachedFree, room: Room, config: AllocatorConfig, *, flush: bool) -> int:
    returned = cached.releasable if flush else 0
    new_segment = segment_request(room.obtainable(returned), config)
    if not config.expandable_segments:
        return new_segment
    pages = grown_request(cached.ends, room.driver_free + returned, config.large_segment_size, flush=flush)
    grown = config.largest_request(pages)
    if room.limit is not None:
        # It is held against the whole request, though the beginning may be mapped already.
        grown = min(grown, segment_request(room.limit - room.reserved + returned, config))
    return grown if grown > SMALL_SIZE else min(new_segment, SMALL_SIZE)


def segment_request(obtainable: int, config: AllocatorConfig) -> int:
    """Largest request that a new segment can serve when cudaMalloc can give `obtainable` bytes."""
    request = config.largest_request(obtainable // ROUND_LARGE * ROUND_LARGE)
    if obtainable >= config.large_segment_size or request >= MIN_LARGE_ALLOC:
        return request
    return SMALL_SIZE if obtainable >= SMALL_BUFFER else 0
