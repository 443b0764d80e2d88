"""Why an allocation failed: capacity, fragmentation, the process's own limit, or memory taken by others.

Decided after the allocator has returned its cache, from what the observer of PyTorch's CUDACachingAllocator.cpp
(2.13, `OutOfMemoryObserver`) is told, the statistics and the snapshot of that moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchmem.allocator.sizes import LARGE_BUFFER, MIN_LARGE_ALLOC, SMALL_BUFFER, SMALL_SIZE
from torchmem.allocator.snapshot import DEFAULT_POOL, SegmentInfo
from torchmem.sample.sample import OomCause, OomDetail

# A context with its libraries takes 200 to 700 MB; what lies beyond belongs to somebody else.
CONTEXT_ALLOWANCE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class OomFacts:
    """What is known inside the observer, in bytes.

    `requested`: segment-rounded request; `limit`: the memory fraction's limit if one is set, else the device
    total (the observer's third argument); `cached_free`: free bytes in the default pools after the release;
    `reserved`: all pools; `total`: of the device, None when unknown; `private_free`: free bytes in the pools of CUDA
    graphs and MemPools; `large_segment`: the segment for requests of 1 to 10 MiB.
    """

    requested: int
    limit: int
    driver_free: int
    cached_free: int
    reserved: int
    total: int | None
    private_free: int = 0
    large_segment: int = LARGE_BUFFER

    @property
    def outside(self) -> int:
        """Bytes that other processes and other libraries hold on the device; 0 when the total is unknown."""
        return 0 if self.total is None else max(0, self.total - self.driver_free - self.reserved)

    @property
    def obtainable(self) -> int:
        """Bytes that the driver may still give to this process; negative when it is over its limit."""
        limited = self.total is not None and self.limit < self.total
        return min(self.driver_free, self.limit - self.reserved) if limited else self.driver_free


def classify(facts: OomFacts) -> OomCause:
    """The cause in one word: fragmentation when compacting PyTorch's own memory would have served the request."""
    free = facts.cached_free + facts.private_free
    if facts.obtainable + free >= facts.requested:
        return "fragmentation"
    if facts.driver_free + free >= facts.requested:
        return "limit"
    foreign = facts.outside - CONTEXT_ALLOWANCE_BYTES
    if foreign > 0 and facts.driver_free + free + foreign >= facts.requested:
        return "external"
    return "capacity"


@dataclass(frozen=True, slots=True)
class LargestFreeBlocks:
    """Largest blocks without a tensor after the release, in bytes, by what kept the request from them.

    `own`: of the request's own stream and pool, those that wait for another stream included; `other_stream`: of its
    pool on other streams; `other_pool`: of the other default pool, or of a CUDA graph or MemPool.
    """

    own: int = 0
    other_stream: int = 0
    other_pool: int = 0


def largest_free_blocks(
    segments: Iterable[SegmentInfo], device: int, requested: int, stream: int | None
) -> LargestFreeBlocks:
    """Sort the free blocks of a device for a segment-rounded request; `stream` is None when unknown.

    Small and large requests have pools of their own (`get_pool`), and a block stays with its stream and pool for as
    long as its segment lives (CUDACachingAllocator.cpp, PyTorch 2.13, `get_free_block`).
    """
    pool = "small" if requested == SMALL_BUFFER else "large"
    largest = {"own": 0, "other_stream": 0, "other_pool": 0}
    for segment in segments:
        if segment["device"] != device:
            continue
        place = "own" if segment["stream"] == stream else "other_stream"
        if segment["segment_pool_id"] != DEFAULT_POOL or segment["segment_type"] != pool:
            place = "other_pool"
        free = (
            block["size"] for block in segment["blocks"] if block["state"] != "active_allocated"
        )
        largest[place] = max(largest[place], *free, 0)
    return LargestFreeBlocks(**largest)


def fragmentation_detail(facts: OomFacts, blocks: LargestFreeBlocks) -> OomDetail:
    """What kind of fragmentation it was; only meaningful when `classify` says so.

    pending: a block fits, but was found free only after PyTorch had searched (pytorch/pytorch#189504). stream, pool:
    a block fits, on another stream or in a pool that this request may not use. small_segment: the request was rounded
    up to a whole segment (`get_allocation_size`, 1 to 10 MiB), and a smaller one might have been had. stranded:
    the free bytes lie between live tensors.
    """
    # A request for a small segment is at most kSmallSize; any other may be as large as its segment.
    needed = SMALL_SIZE if facts.requested == SMALL_BUFFER else facts.requested
    if blocks.own >= needed:
        return "pending"
    if blocks.other_stream >= needed:
        return "stream"
    if blocks.other_pool >= needed or facts.obtainable + facts.cached_free < facts.requested:
        return "pool"
    rounded = facts.requested == facts.large_segment and blocks.own < MIN_LARGE_ALLOC
    return "small_segment" if rounded and facts.obtainable > SMALL_SIZE else "stranded"
