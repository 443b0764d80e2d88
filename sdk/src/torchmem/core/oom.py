"""Why an allocation failed: capacity, fragmentation, the process's own limit, or memory taken by others.

Decided after the allocator has returned its cache, from what the observer of PyTorch's CUDACachingAllocator.cpp
(2.13, `OutOfMemoryObserver`) is told and the statistics at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.core.sample import OomCause

# A context with its libraries takes 200 to 700 MB; what lies beyond belongs to somebody else.
CONTEXT_ALLOWANCE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class OomFacts:
    """What is known inside the observer, in bytes.

    `requested`: segment-rounded request; `limit`: the memory fraction's limit if one is set, else the device
    total (the observer's third argument); `cached_free`: free bytes in the default pools after the release;
    `reserved`: all pools; `total`: of the device, None when unknown.
    """

    requested: int
    limit: int
    driver_free: int
    cached_free: int
    reserved: int
    total: int | None

    @property
    def outside(self) -> int:
        """Bytes that other processes and other libraries hold on the device; 0 when the total is unknown."""
        return 0 if self.total is None else max(0, self.total - self.driver_free - self.reserved)


def classify(facts: OomFacts) -> OomCause:
    """The cause in one word: fragmentation when compacting PyTorch's own memory would have served the request."""
    limited = facts.total is not None and facts.limit < facts.total
    obtainable = min(facts.driver_free, facts.limit - facts.reserved) if limited else facts.driver_free
    if obtainable + facts.cached_free >= facts.requested:
        return "fragmentation"
    if facts.driver_free + facts.cached_free >= facts.requested:
        return "limit"
    foreign = facts.outside - CONTEXT_ALLOWANCE_BYTES
    if foreign > 0 and facts.driver_free + facts.cached_free + foreign >= facts.requested:
        return "external"
    return "capacity"
