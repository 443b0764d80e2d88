"""The state of one device across reads: counters, high-water marks, layout, and OOMs."""

from __future__ import annotations

import time
from dataclasses import replace

from torchmem.allocator.backend import Device
from torchmem.allocator.fragmentation import Measurement
from torchmem.allocator.headroom import AvailableMemory
from torchmem.allocator.later_layout import is_outdated, layout_at
from torchmem.allocator.outside_memory import outside_bytes
from torchmem.allocator.snapshot import NestedStats
from torchmem.sample.sample import (
    COUNTED,
    Allocator,
    ByPool,
    Counters,
    DeviceSample,
    FirstRead,
    Layout,
)
from torchmem.sdk.reading.run_history import RunHistoryRecorder

PEAKS = ("allocated_bytes", "active_bytes", "reserved_bytes")


Flows = tuple[int, ...]
"""Allocations and frees since the process started; the blocks are the same as long as they are."""


def flows(stats: NestedStats | None) -> Flows | None:
    """Return the flows in one nested statistics dict; None if this allocator does not count."""
    if not stats or any(name not in stats for name in _FLOWS):
        return None
    values = [stats[name]["all"] for name in _FLOWS]
    if any("freed" not in value for value in values):
        return None
    return tuple(value[way] for value in values for way in ("allocated", "freed"))


_FLOWS = ("allocation", "active", "segment", "reserved_bytes")


class MonotonicCounter:
    """A total that keeps growing when its source is reset to zero."""

    def __init__(self) -> None:
        self.total = 0
        self._last = 0

    def update(self, value: int) -> None:
        """Add the increase of the source; a lower value means that the source was reset."""
        self.total += value - self._last if value >= self._last else value
        self._last = value

    def skip(self, value: int) -> None:
        """Do not count the increase of the source up to this value."""
        self._last = max(self._last, value)


class DeviceRecord:
    """What is known about one device, updated at every read.

    Once `watched_peak` is 0, it becomes the highest peak of the allocated bytes in later reads.
    `communicators` is what NCCL counts outside the allocator, in bytes.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.requested: int | None = None
        self.requested_peak = 0
        self.allocator: Allocator | None = None
        self.driver_free: int | None = None
        self.limit: int | None = None
        self.first_read: FirstRead | None = None
        self.stats_timestamp: float | None = None
        self.measured: Measurement | None = None
        self.periodic_layout: Layout | None = None
        self.components: dict[str, int] = {}
        self.allocations = self.frees = 0
        self.freed_bytes: int | None = None
        self.component_peaks: dict[str, int] = {}
        self.component_peak_time: float | None = None
        self._counters: dict[str, MonotonicCounter] = {}
        self._peaks = dict.fromkeys(PEAKS, 0)
        self._reports_ooms = False
        self._flows = {name: MonotonicCounter() for name in ("allocated", "freed")}
        self._window_peak = 0
        self.watched_peak: int | None = None
        self.communicators = 0
        self.run_history = RunHistoryRecorder()
        self._shown: tuple[Measurement | None, Flows | None] = None, None

    def update(self, stats: NestedStats) -> None:
        """Take one nested statistics dict whose components are not known yet."""
        self.components, self.component_peaks, self.component_peak_time = {}, {}, None
        self.stats_timestamp = time.time()
        for name in COUNTED:
            if name in stats:
                self._counters.setdefault(name, MonotonicCounter()).update(stats[name])
        self.keep_peaks(stats)
        for name, flow in self._flows.items():
            flow.update(stats["reserved_bytes"]["all"].get(name, 0))
        if "allocation" in stats:
            self.allocations = stats["allocation"]["all"]["allocated"]
            self.frees = stats["allocation"]["all"]["freed"]
        self.freed_bytes = stats["allocated_bytes"]["all"].get("freed")
        self._reports_ooms = "num_ooms" in stats
        self.allocator = self._allocator(stats)

    def skip_retries(self, retries: int) -> None:
        """Do not count retries since the last read, up to this value: torchmem caused them."""
        if "num_alloc_retries" in self._counters:
            self._counters["num_alloc_retries"].skip(retries)

    def update_driver(self, free: int | None, limit: int | None) -> None:
        """Take the driver's free bytes and the limit, read right after the statistics."""
        self.driver_free = free
        total = self.device.total_bytes
        self.limit = limit if limit is not None and total is not None and limit < total else None
        if self.first_read is None and free is not None and self.stats_timestamp is not None:
            self.first_read = FirstRead(self.stats_timestamp, self.reserved_bytes(), free)

    def keep_peaks(self, stats: NestedStats) -> None:
        """Take only the peaks of one nested statistics dict."""
        # The script may reset PyTorch's peaks at any time, so the highest one seen is kept.
        for name in PEAKS:
            self._peaks[name] = max(self._peaks[name], stats[name]["all"]["peak"])
        self._window_peak = max(self._window_peak, stats["active_bytes"]["all"]["peak"])
        if self.watched_peak is not None:
            self.watched_peak = max(self.watched_peak, stats["allocated_bytes"]["all"]["peak"])
        requested = stats["requested_bytes"]["all"] if "requested_bytes" in stats else None
        if requested:
            self.requested = requested["current"]
            self.requested_peak = max(self.requested_peak, requested["peak"])

    def _allocator(self, stats: NestedStats) -> Allocator:
        return Allocator(
            allocated_bytes=_by_pool(stats, "allocated_bytes"),
            active_bytes=_by_pool(stats, "active_bytes"),
            reserved_bytes=_by_pool(stats, "reserved_bytes"),
            requested_bytes=_by_pool_if_known(stats, "requested_bytes"),
            inactive_split_bytes=_by_pool_if_known(stats, "inactive_split_bytes"),
            allocated_peak_bytes=self._peaks["allocated_bytes"],
            active_peak_bytes=self._peaks["active_bytes"],
            reserved_peak_bytes=self._peaks["reserved_bytes"],
        )

    @property
    def has_allocated(self) -> bool:
        """Whether memory was ever reserved; True if the allocator has no statistics."""
        return self.allocator is None or self._peaks["reserved_bytes"] > 0

    @property
    def layout(self) -> Layout | None:
        """The layout in the latest snapshot."""
        return self.measured.layout if self.measured else None

    def note_flows(self, moved: Flows | None) -> None:
        """Note the flows just before the snapshot that was measured."""
        self._shown = self.measured, moved

    def shows(self, moved: Flows | None) -> bool:
        """Return whether the latest snapshot has the blocks that exist at these flows."""
        measured, shown = self._shown
        return moved is not None and moved == shown and measured is self.measured

    def keep_layout(self) -> None:
        """Date the layout to the latest read, as no block has changed."""
        if self.measured is not None and self.stats_timestamp is not None:
            layout = replace(self.measured.layout, timestamp=self.stats_timestamp)
            self.measured = replace(self.measured, layout=layout)
            self.periodic_layout = layout
            self.note_flows(self._shown[1])

    def reserved_bytes(self) -> int:
        """Return the reserved bytes at the latest read; 0 if they are unknown."""
        return self.allocator.reserved_bytes.total if self.allocator else 0

    @property
    def alloc_retries(self) -> int | None:
        """Retries since the process started; None if they are unknown."""
        counter = self._counters.get("num_alloc_retries")
        return None if counter is None else counter.total

    def add_point(
        self,
        steps: int,
        allocated: int,
        outside: int | None = None,
        components: dict[str, int] | None = None,
    ) -> None:
        """Take a point of the run's history at a step's end, with the peaks kept so far."""
        self.run_history.add(
            steps,
            allocated,
            self._peaks["active_bytes"],
            stranded=self.layout.stranded_bytes if self.layout else None,
            outside=outside,
            components=components,
        )

    def add_read_point(self, steps: int) -> None:
        """Take a point of the run's history from the latest read, which was just made."""
        if self.allocator is not None:
            outside = outside_bytes(self.bare_sample(), self.driver_free)
            allocated = self.allocator.allocated_bytes.total
            self.add_point(steps, allocated, outside, self.components)

    def bare_sample(self) -> DeviceSample:
        """Return the device and its latest statistics, as the allocator's arithmetic takes them."""
        device = self.device
        return DeviceSample(
            index=device.index,
            uuid=device.uuid,
            name=device.name,
            total_bytes=device.total_bytes,
            allocator=self.allocator,
            driver_free_bytes=self.driver_free,
            limit_bytes=self.limit,
            shares_host_memory=device.shares_host_memory,
            visible_devices=device.visible_devices,
        )

    def end_window(self) -> int:
        """Start a new window and return the highest active bytes of the previous one.

        Correct only where PyTorch's peaks are reset at the start of each window.
        """
        peak, self._window_peak = self._window_peak, 0
        return peak

    @property
    def taken_bytes(self) -> int:
        """Bytes that the allocator took from the driver since the process started."""
        return self._flows["allocated"].total

    def sample(self, *, expandable: bool) -> DeviceSample:
        """Return the device as it is published.

        With expandable segments PyTorch keeps no inactive_split, so it is left out.
        """
        allocator = self.allocator
        if allocator is not None and expandable:
            allocator = replace(allocator, inactive_split_bytes=None)
        return replace(
            self.bare_sample(),
            allocator=allocator,
            counters=self._counts(),
            layout=self._layout(),
            stats_timestamp=self.stats_timestamp,
            components=self.components,
            component_peaks=self.component_peaks,
            component_peak_timestamp=self.component_peak_time,
            first_read=self.first_read,
            run_history=self.run_history.published(),
        )

    def _layout(self) -> Layout | None:
        """Return the layout beside the statistics, if these are newer."""
        free, allocator, measured = self.driver_free, self.allocator, self._earlier()
        if free is None or allocator is None or measured is None:
            return self.layout
        return layout_at(
            measured, allocator, AvailableMemory(free, self.reserved_bytes(), self.limit)
        )

    def _earlier(self) -> Measurement | None:
        """Return the latest snapshot if the statistics were read after it."""
        measured, read = self.measured, self.stats_timestamp
        is_earlier = measured and read is not None and measured.layout.timestamp <= read
        return measured if is_earlier else None

    @property
    def is_outdated(self) -> bool:
        """Whether the allocator has returned memory or taken more since the snapshot."""
        measured, allocator = self._earlier(), self.allocator
        return measured is not None and allocator is not None and is_outdated(measured, allocator)

    def _counts(self) -> Counters:
        totals = {
            field: self._counters[name].total
            for name, field in COUNTED.items()
            if name in self._counters
        }
        return Counters(ooms={} if self._reports_ooms else None, **totals)


def _by_pool(stats: NestedStats, name: str) -> ByPool:
    pools = stats[name]
    if "small_pool" not in pools:
        return ByPool(None, None, pools["all"]["current"])
    return ByPool(pools["small_pool"]["current"], pools["large_pool"]["current"])


def _by_pool_if_known(stats: NestedStats, name: str) -> ByPool | None:
    return _by_pool(stats, name) if name in stats else None
