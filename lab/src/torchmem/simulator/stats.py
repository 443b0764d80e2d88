"""The allocator's statistics, as `torch.cuda.memory_stats_as_nested_dict()` returns them.

Names and meaning: c10/core/CachingDeviceAllocator.h (`Stat`, `StatArray`, `DeviceStats`) and
torch/csrc/cuda/Module.cpp (`THCPModule_memoryStats`), PyTorch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torchmem.allocator.snapshot import PoolId


@dataclass(slots=True, eq=False)
class Stat:
    """One number over time: its current value, its peak, and the sum of its increases.

    The sum of decreases follows from these and is not stored. To decrease the number, subtract the
    amount from `current`. The sums start again at each reset.
    """

    current: int = 0
    peak: int = 0
    allocated: int = 0
    current_at_reset: int = 0

    @property
    def freed(self) -> int:
        """The sum of all decreases since the sums were reset."""
        return self.current_at_reset + self.allocated - self.current

    def increase(self, amount: int) -> None:
        """Add `amount`."""
        self.allocated += amount
        self.current = current = self.current + amount
        if current > self.peak:  # noqa: PLR1730 -- this is the hottest line; max() costs a call
            self.peak = current

    def reset_peak(self) -> None:
        """Set the peak to the current value."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Set both sums to 0; `current` stays, so it no longer equals their difference."""
        self.allocated = 0
        self.current_at_reset = self.current

    def as_dict(self) -> dict[str, int]:
        """Return the four values by PyTorch's names."""
        return {
            "current": self.current,
            "peak": self.peak,
            "allocated": self.allocated,
            "freed": self.freed,
        }


@dataclass(slots=True, eq=False)
class PoolStat(Stat):
    """The statistic of the small or the large pool in a `StatArray`."""

    array: StatArray = field(kw_only=True)

    def increase(self, amount: int) -> None:
        """Add `amount`, and update the peak of both pools together."""
        self.allocated += amount
        self.current = current = self.current + amount
        if current > self.peak:  # noqa: PLR1730
            self.peak = current
        array = self.array
        both = array.small_pool.current + array.large_pool.current
        if both > array.peak:  # noqa: PLR1730
            array.peak = both


class StatArray:
    """One statistic of the small pool, of the large pool, and of both together.

    Only the peak of the sum is stored; its other values follow from the two pools.
    """

    __slots__ = ("large_pool", "peak", "small_pool")

    def __init__(self) -> None:
        self.small_pool = PoolStat(array=self)
        self.large_pool = PoolStat(array=self)
        self.peak = 0

    @property
    def current(self) -> int:
        """The current value of both pools together."""
        return self.small_pool.current + self.large_pool.current

    def reset_peak(self) -> None:
        """Set all three peaks to their current values."""
        self.peak = self.current
        self.small_pool.reset_peak()
        self.large_pool.reset_peak()

    def reset_accumulated(self) -> None:
        """Set all sums to 0."""
        self.small_pool.reset_accumulated()
        self.large_pool.reset_accumulated()

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the values by PyTorch's names."""
        small, large = self.small_pool.as_dict(), self.large_pool.as_dict()
        both = {name: small[name] + large[name] for name in small} | {"peak": self.peak}
        return {"all": both, "small_pool": small, "large_pool": large}


COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)
"""Names of the statistics that are only counters."""
UNLIMITED_SPLIT_SIZE = -1
"""PyTorch's `max_split_size` when none is set."""


@dataclass(slots=True, eq=False)
class DeviceStats:
    """The statistics of one device; names without `bytes` count blocks or segments.

    `stranded_offset` is what `inactive_split_bytes` lacks to be the stranded bytes: it includes
    private pools and excludes expandable segments.
    """

    allocation: StatArray = field(default_factory=StatArray)
    segment: StatArray = field(default_factory=StatArray)
    active: StatArray = field(default_factory=StatArray)
    inactive_split: StatArray = field(default_factory=StatArray)
    allocated_bytes: StatArray = field(default_factory=StatArray)
    reserved_bytes: StatArray = field(default_factory=StatArray)
    active_bytes: StatArray = field(default_factory=StatArray)
    inactive_split_bytes: StatArray = field(default_factory=StatArray)
    requested_bytes: StatArray = field(default_factory=StatArray)
    oversize_allocations: Stat = field(default_factory=Stat)
    oversize_segments: Stat = field(default_factory=Stat)
    num_alloc_retries: int = 0
    num_ooms: int = 0
    num_oom_rejections: int = 0
    num_sync_all_streams: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0
    max_split_size: int = UNLIMITED_SPLIT_SIZE
    stranded_offset: int = 0
    reserved_bytes_by_private_pools: dict[PoolId, StatArray] = field(default_factory=dict)

    @property
    def stranded_bytes(self) -> int:
        """The free bytes of the default pools that cannot go back to the driver."""
        return self.inactive_split_bytes.current + self.stranded_offset

    def of_pool(self, *, is_small: bool) -> PoolStats:
        """Return the statistics of the small or of the large pool."""
        arrays = (getattr(self, item.name) for item in fields(PoolStats))
        return PoolStats(*(array.small_pool if is_small else array.large_pool for array in arrays))

    def reserved_bytes_of(self, pool_id: PoolId) -> StatArray:
        """Return the reserved bytes of a private pool; the entry remains after the pool is gone."""
        return self.reserved_bytes_by_private_pools.setdefault(pool_id, StatArray())

    def reset_peak(self) -> None:
        """Reset the peaks, as `torch.cuda.reset_peak_memory_stats()` does."""
        for stat in self._stats():
            stat.reset_peak()

    def reset_accumulated(self) -> None:
        """Reset the sums and counters, as `torch.cuda.reset_accumulated_memory_stats()` does."""
        for stat in self._stats():
            stat.reset_accumulated()
        for name in COUNTERS:
            setattr(self, name, 0)

    def as_nested_dict(self) -> dict[str, Any]:
        """Return what `torch.cuda.memory_stats_as_nested_dict()` of PyTorch 2.13 returns."""
        private = self.reserved_bytes_by_private_pools
        return {
            **{name: getattr(self, name).as_dict() for name in STATS},
            **{name: getattr(self, name) for name in (*COUNTERS, "max_split_size")},
            "reserved_bytes_by_private_pools": {pool: private[pool].as_dict() for pool in private},
        }

    def _stats(self) -> list[Stat | StatArray]:
        return [
            *(getattr(self, name) for name in STATS),
            *self.reserved_bytes_by_private_pools.values(),
        ]


@dataclass(frozen=True, slots=True, eq=False)
class PoolStats:
    """The statistics of the small or of the large pool."""

    allocation: PoolStat
    segment: PoolStat
    active: PoolStat
    inactive_split: PoolStat
    allocated_bytes: PoolStat
    reserved_bytes: PoolStat
    active_bytes: PoolStat
    inactive_split_bytes: PoolStat
    requested_bytes: PoolStat

    def block_allocated(self, size: int, requested: int) -> None:
        """Count a block of `size` bytes, given to a caller that requested `requested` bytes."""
        self.allocation.increase(1)
        self.allocated_bytes.increase(size)
        self.active.increase(1)
        self.active_bytes.increase(size)
        self.requested_bytes.increase(requested)

    def block_returned(self, size: int) -> None:
        """Count a block that its caller freed; it stays active until it can be reused."""
        self.allocation.current -= 1
        self.allocated_bytes.current -= size

    def block_freed(self, size: int, requested: int) -> None:
        """Count a block that became free for reuse."""
        self.active.current -= 1
        self.active_bytes.current -= size
        self.requested_bytes.current -= requested


STATS = (*(item.name for item in fields(PoolStats)), "oversize_allocations", "oversize_segments")
"""Names of the statistics that have a peak and sums."""
