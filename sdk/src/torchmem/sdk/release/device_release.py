"""What is known about each device to decide whether a release pays, and what releases did there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.sizes import MIB
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.sample.release_tiers import ReleaseTier
from torchmem.sdk.draft import DeviceDraft
from torchmem.sdk.reading.device import DeviceRecord
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.release.account import ReleaseAccount

# A release waits for every stream, which does not pay for less memory.
MIN_RELEASABLE_BYTES = 256 * MIB
# The next window is expected to need the highest peak of this many windows.
RECENT_WINDOWS = 3
# How long an idle process keeps from its neighbors what it has waited for.
PROMISE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device's memory at the end of a step, in bytes.

    total: size of the device.
    driver_free: free memory at the driver.
    active: bytes in active blocks.
    releasable: bytes in segments that are wholly free.
    next_peak: active bytes that the next step is expected to reach.
    """

    total: int
    driver_free: int
    active: int
    releasable: int
    next_peak: int

    @property
    def expected_regrowth(self) -> int:
        """The released bytes that the next step would take from the driver again.

        Stranded bytes are not expected to serve it.
        """
        return min(self.releasable, max(0, self.next_peak - self.active))

    @property
    def can_spare(self) -> bool:
        """Whether enough is releasable, and at least half of it would stay released."""
        regrowth = self.expected_regrowth
        return self.releasable >= MIN_RELEASABLE_BYTES and 2 * regrowth <= self.releasable

    def should_release(self, share: float) -> bool:
        """Return whether the driver has less than `share` of the device, and a release pays."""
        return self.driver_free < share * self.total and self.can_spare


def predicted_peak(windows: Sequence[int], count: int = RECENT_WINDOWS) -> int | None:
    """Return the highest of the latest `count` window peaks, or None if there are too few."""
    return max(windows[-count:]) if len(windows) >= count else None


@dataclass(slots=True)
class Promise:
    """Memory that the script has waited for: the active bytes that it expects to reach."""

    peak: int
    until: float
    windows: int = RECENT_WINDOWS


@dataclass(slots=True)
class DeviceRelease:
    """The releases on one device. A window lasts from one read at a step's end to the next.

    accounts: what each tier returned.
    peaks: active bytes that each of the latest windows reached or was expected to reach.
    promise: what the script has waited for and not used yet.
    is_short: whether to ask the neighbors for memory; the background thread asks them.
    neighbor_requests, wait_seconds: see `torchmem.sample.sample.Counters`.
    """

    record: DeviceRecord
    accounts: dict[ReleaseTier, ReleaseAccount] = field(default_factory=dict)
    peaks: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_WINDOWS))
    promise: Promise | None = None
    is_short: bool = False
    neighbor_requests: int | None = None
    wait_seconds: float | None = None
    _taken: int = 0
    _retries: int | None = None
    _reserved_after: tuple[float | None, int] = None, 0

    @property
    def name(self) -> str:
        """The device's UUID, or torch's index."""
        return self.record.device.uuid or str(self.record.device.index)

    def account(self, tier: ReleaseTier) -> ReleaseAccount:
        """Return the account of a tier, which is published from then on."""
        return self.accounts.setdefault(tier, ReleaseAccount(tier))

    def end_window(self) -> None:
        """End a window."""
        taken = self.record.taken_bytes - self._taken
        self._taken = self.record.taken_bytes
        for account in self.accounts.values():
            account.end_window(taken)
        self.peaks.append(self._expected_peak(self.record.end_window()))

    def has_retried(self) -> bool:
        """Return whether the allocator has emptied its cache to retry since the previous call."""
        before, self._retries = self._retries, self.record.alloc_retries or 0
        return before is not None and self._retries > before

    def _expected_peak(self, peak: int) -> int:
        """Return a window's peak, or what the script has waited for and not used yet."""
        promise = self.promise
        if promise is None:
            return peak
        promise.windows -= 1
        if 2 * peak >= promise.peak or promise.windows <= 0:
            self.promise = None
        return max(peak, promise.peak)

    def promise_bytes(self, wanted: int) -> None:
        """Expect the next step to need `wanted` bytes, which the script has waited for."""
        if self.record.allocator:
            active = self.record.allocator.active_bytes.total
            self.promise = Promise(active + wanted, time.monotonic() + PROMISE_SECONDS)

    @property
    def is_promised(self) -> bool:
        """Whether an idle process still keeps what it has waited for."""
        promise = self.promise
        return promise is not None and time.monotonic() < promise.until

    def missing_bytes(self, share: float) -> int:
        """Return the bytes by which the driver's free memory is below `share` of the device."""
        free, total = self.record.driver_free, self.record.device.total_bytes
        return 0 if free is None or total is None else max(0, int(share * total) - free)

    def is_below(self, tier: ReleaseTier, share: float) -> bool:
        """Return whether the driver has less than `share` free, and the tier is not given up."""
        account = self.accounts.get(tier)
        return account is not None and not account.given_up and self.missing_bytes(share) > 0

    def memory(self, segments: Sequence[SegmentInfo], windows: int) -> DeviceMemory | None:
        """Return the memory by a snapshot; None if it is unknown, or there were too few windows."""
        record, peak = self.record, predicted_peak(list(self.peaks), windows)
        free, total, allocator = record.driver_free, record.device.total_bytes, record.allocator
        if free is None or total is None or peak is None or allocator is None:
            return None
        releasable = measure(segments, record.device.index, time.time()).releasable_bytes
        return DeviceMemory(total, free, allocator.active_bytes.total, releasable, peak)

    def end_release(self, reserved: int) -> None:
        """Note the reserved bytes after a release."""
        self._reserved_after = self.record.stats_timestamp, reserved

    def known_reserved(self) -> int:
        """Return the reserved bytes at the last read, or after a later release, without a read."""
        stamp, reserved = self._reserved_after
        is_newer = stamp is not None and stamp == self.record.stats_timestamp
        return reserved if is_newer else self.record.reserved_bytes()

    def complete(self, device: DeviceDraft) -> None:
        """Add what the releases did to the device's sample."""
        if self.neighbor_requests is not None or self.wait_seconds is not None:
            device.count(neighbor_requests=self.neighbor_requests, wait_seconds=self.wait_seconds)
        if self.accounts:
            accounts = list(self.accounts.items())
            device.add(releases={tier: account.published() for tier, account in accounts})


class DeviceReleases:
    """The releases on all devices."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._devices: dict[int, DeviceRelease] = {}

    def by_index(self) -> dict[int, DeviceRelease]:
        """Return those of each device, by torch's index."""
        for index, record in self.recorder.records().items():
            if index not in self._devices:
                self._devices[index] = DeviceRelease(record)
        return dict(self._devices)

    def all(self) -> Iterable[DeviceRelease]:
        """Return those of each device."""
        return self.by_index().values()
