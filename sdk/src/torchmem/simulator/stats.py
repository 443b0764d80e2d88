"""The allocator's statistics, kept and returned as `torch.cuda.memory_stats_as_nested_dict()` returns them.

Names and meaning: c10/core/CachingDeviceAllocator.h (`Stat`, `DeviceStats`) and torch/csrc/cuda/Module.cpp
(`THCPModule_memoryStats`), PyTorch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True, eq=False)
class Stat:
    """One number over time: now, at most, and the sum of all increases since the sums were reset.

    The sum of all decreases follows from these and is not kept: to decrease, take the amount off `current`.
    """

    current: int = 0
    peak: int = 0
    allocated: int = 0
    current_at_reset: int = 0

    @property
    def freed(self) -> int:
        """Sum of all decreases since the sums were reset."""
        return self.current_at_reset + self.allocated - self.current

    def increase(self, amount: int) -> None:
        """Add `amount`."""
        self.allocated += amount
        self.current = current = self.current + amount
        if current > self.peak:  # noqa: PLR1730 -- max() costs a call on the hottest line
            self.peak = current

    def reset_peak(self) -> None:
        """Start the peak again from the current value."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Start both sums again from 0; `current` stays, so it no longer equals their difference."""
        self.allocated = 0
        self.current_at_reset = self.current

    def as_dict(self) -> dict[str, int]:
        """The four values by PyTorch's names."""
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated, "freed": self.freed}


@dataclass(slots=True, eq=False)
class PoolStats:
    """The nine statistics that PyTorch keeps for each pool; the plain names count blocks or segments."""

    allocation: Stat = field(default_factory=Stat)
    segment: Stat = field(default_factory=Stat)
    active: Stat = field(default_factory=Stat)
    inactive_split: Stat = field(default_factory=Stat)
    allocated_bytes: Stat = field(default_factory=Stat)
    reserved_bytes: Stat = field(default_factory=Stat)
    active_bytes: Stat = field(default_factory=Stat)
    inactive_split_bytes: Stat = field(default_factory=Stat)
    requested_bytes: Stat = field(default_factory=Stat)

    def block_allocated(self, size: int, requested: int) -> None:
        """A block of `size` bytes went to a caller who asked for `requested`."""
        self.allocation.increase(1)
        self.allocated_bytes.increase(size)
        self.active.increase(1)
        self.active_bytes.increase(size)
        self.requested_bytes.increase(requested)

    def block_returned(self, size: int) -> None:
        """The caller gave a block back; it stays active until it may be reused."""
        self.allocation.current -= 1
        self.allocated_bytes.current -= size

    def block_freed(self, size: int, requested: int) -> None:
        """A block became free for reuse."""
        self.active.current -= 1
        self.active_bytes.current -= size
        self.requested_bytes.current -= requested

    def inactive_split_changed(self, blocks: int, size: int) -> None:
        """Free blocks that have a neighbour became more or fewer, by their number and by bytes."""
        if blocks > 0:
            self.inactive_split.increase(blocks)
        else:
            self.inactive_split.current += blocks
        if size > 0:
            self.inactive_split_bytes.increase(size)
        else:
            self.inactive_split_bytes.current += size

    def segment_allocated(self, size: int) -> None:
        """The driver gave a segment."""
        self.segment.increase(1)
        self.reserved_bytes.increase(size)

    def segment_freed(self, size: int) -> None:
        """A segment went back to the driver."""
        self.segment.current -= 1
        self.reserved_bytes.current -= size


POOL_STATS = tuple(item.name for item in fields(PoolStats))
"""Names of the statistics kept for each pool."""
COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)
"""Names of the plain counters."""
UNLIMITED_SPLIT_SIZE = -1
"""PyTorch's `max_split_size` when none is set."""


@dataclass(slots=True, eq=False)
class DeviceStats:
    """Statistics of one device: for each pool and for both together, and what is counted once."""

    all: PoolStats = field(default_factory=PoolStats)
    small_pool: PoolStats = field(default_factory=PoolStats)
    large_pool: PoolStats = field(default_factory=PoolStats)
    oversize_allocations: Stat = field(default_factory=Stat)
    oversize_segments: Stat = field(default_factory=Stat)
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_oom_rejections: int = 0
    num_sync_all_streams: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0

    def reset_peak(self) -> None:
        """`torch.cuda.reset_peak_memory_stats()`."""
        for stat in self._stats():
            stat.reset_peak()

    def reset_accumulated(self) -> None:
        """`torch.cuda.reset_accumulated_memory_stats()`: also sets the plain counters to 0, as PyTorch does."""
        for stat in self._stats():
            stat.reset_accumulated()
        for name in COUNTERS:
            setattr(self, name, 0)

    def as_nested_dict(self) -> dict[str, Any]:
        """`torch.cuda.memory_stats_as_nested_dict()` of PyTorch 2.13 under the default settings."""
        nested: dict[str, Any] = {name: self._by_pool(name) for name in POOL_STATS}
        for name in ("oversize_allocations", "oversize_segments"):
            nested[name] = getattr(self, name).as_dict()
        for name in COUNTERS:
            nested[name] = getattr(self, name)
        return nested | {"max_split_size": UNLIMITED_SPLIT_SIZE, "reserved_bytes_by_private_pools": {}}

    def _by_pool(self, name: str) -> dict[str, dict[str, int]]:
        return {pool: getattr(getattr(self, pool), name).as_dict() for pool in ("all", "small_pool", "large_pool")}

    def _stats(self) -> list[Stat]:
        pools = (self.all, self.small_pool, self.large_pool)
        return [getattr(pool, name) for pool in pools for name in POOL_STATS] + [
            self.oversize_allocations,
            self.oversize_segments,
        ]
