"""The evidence of an OOM in PyTorch's allocator: the request, and the memory that was free.

`torchmem.explain.verdict` judges it. The inputs are taken after the allocator has emptied its
cache: the arguments of the observer in PyTorch's CUDACachingAllocator.cpp (2.13,
`OutOfMemoryObserver`), the statistics and the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchmem.allocator.sizes import LARGE_BUFFER, MIN_LARGE_ALLOC, SMALL_BUFFER, SMALL_SIZE
from torchmem.allocator.snapshot import DEFAULT_POOL, SegmentInfo
from torchmem.sample.sample import OomDetail

# A context and its libraries take 200 to 700 MB; memory beyond that belongs to other processes.
CONTEXT_ALLOWANCE_BYTES = 1 << 30
# With NCCL's communicators: each takes up to a few hundred MB, and jobs have one to ten of them.
COMMUNICATORS_ALLOWANCE_BYTES = 4 << 30
# The driver allocates whole pages of 2 MiB, and the process frees little while an error is raised.
REFUSAL_SLACK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class OomEvidence:
    """What is known when the observer is called, in bytes.

    Attributes:
        requested: the request, rounded up to a segment.
        limit: the memory fraction's limit, or the device's total without one (the observer's third
            argument).
        driver_free: free memory at the driver.
        cached_free: free bytes in the default pools after the cache was emptied.
        reserved: reserved bytes of all pools.
        total: memory of the device; None if unknown.
        private_free: free bytes in the pools of CUDA graphs and MemPools.
        large_segment: size of the segment for requests of 1 to 10 MiB.
        communicators: what NCCL counts of this process's communicators, 0 if it does not.
        shares_host_memory: whether the memory is the host's, which holds what else is in use.
        managed: managed memory of this process, which may be on the device.
    """

    requested: int
    limit: int
    driver_free: int
    cached_free: int
    reserved: int
    total: int | None
    private_free: int = 0
    large_segment: int = LARGE_BUFFER
    communicators: int = 0
    shares_host_memory: bool = False
    managed: int = 0

    @property
    def needed(self) -> int:
        """The largest block that the request may need.

        A request for a small segment is at most kSmallSize; any other may be as large as its
        segment.
        """
        return SMALL_SIZE if self.requested == SMALL_BUFFER else self.requested

    @property
    def outside(self) -> int:
        """Bytes of the device held by other processes and other libraries; 0 if unknown."""
        if self.total is None or self.shares_host_memory:
            return 0
        return max(0, self.total - self.driver_free - self.reserved - self.managed)

    def foreign(self, at_start: int | None, *, is_alone: bool) -> int:
        """Return the least that other processes hold.

        `at_start` is what was outside the allocator at the first read, None if unknown. Later bytes
        may belong to this process's own communicators: what NCCL counts, or up to an allowance,
        unless it `is_alone`.
        """
        outside = max(0, self.outside - self.communicators)
        if at_start is None:
            return max(0, outside - CONTEXT_ALLOWANCE_BYTES)
        if is_alone:
            return max(0, outside - min(at_start, CONTEXT_ALLOWANCE_BYTES))
        own = max(COMMUNICATORS_ALLOWANCE_BYTES, CONTEXT_ALLOWANCE_BYTES + self.communicators)
        at_start = min(at_start, outside)
        return max(0, at_start - CONTEXT_ALLOWANCE_BYTES, self.outside - own)

    @property
    def is_refused(self) -> bool:
        """Whether the driver had what it did not give, and no memory fraction forbade it."""
        return self.obtainable >= self.requested + REFUSAL_SLACK_BYTES

    @property
    def obtainable(self) -> int:
        """Bytes the driver can still give to this process; negative if it is over its limit."""
        return self.obtainable_of(self.driver_free)

    def obtainable_of(self, driver_free: int) -> int:
        """Return how many bytes the process could take if the driver had this many free."""
        limited = self.total is not None and self.limit < self.total
        return min(driver_free, self.limit - self.reserved) if limited else driver_free


@dataclass(frozen=True, slots=True)
class LargestFreeBlocks:
    """The largest blocks without a tensor after the cache was emptied, in bytes.

    Attributes:
        own: in the request's stream and pool, including blocks that wait for another stream.
        other_stream: in the request's pool, on other streams.
        other_pool: in the other default pool, or in the pool of a CUDA graph or MemPool.
    """

    own: int = 0
    other_stream: int = 0
    other_pool: int = 0


def largest_free_blocks(
    segments: Iterable[SegmentInfo], device: int, requested: int, stream: int | None
) -> LargestFreeBlocks:
    """Return the largest free blocks of a device, relative to a request.

    `requested` is rounded up to a segment; `stream` is None if unknown. Small and large requests
    have separate pools (`get_pool`), and a block keeps its stream and pool as long as its segment
    exists (CUDACachingAllocator.cpp, PyTorch 2.13, `get_free_block`).
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


def fragmentation_detail(evidence: OomEvidence, blocks: LargestFreeBlocks) -> OomDetail:
    """Return the kind of fragmentation; valid only if that is the cause.

    stream, pool: a block fits, but on another stream, or in a pool that the request may not use.
    small_segment: the request was rounded up to a whole segment (`get_allocation_size`, 1 to
        10 MiB), and a smaller one might have been available.
    stranded: the free bytes lie between live tensors.
    """
    if blocks.other_stream >= evidence.needed:
        return "stream"
    if (
        blocks.other_pool >= evidence.needed
        or evidence.obtainable + evidence.cached_free < evidence.requested
    ):
        return "pool"
    rounded = evidence.requested == evidence.large_segment and blocks.own < MIN_LARGE_ALLOC
    return "small_segment" if rounded and evidence.obtainable > SMALL_SIZE else "stranded"
