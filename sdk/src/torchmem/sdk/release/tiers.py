"""What each tier of the setting `release` does, and when; docs/release.md explains the conditions.

To add a tier, declare it in `torchmem.sample.release_tiers`, and write a class in `ACTIONS` here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar

from torchmem.sample.native_threads import is_main_thread
from torchmem.sample.release_tiers import ReleaseTier
from torchmem.sdk.observation import Oom
from torchmem.sdk.oom.ending import in_excepthook
from torchmem.sdk.release.cache import Cache
from torchmem.sdk.release.device_release import (
    MIN_RELEASABLE_BYTES,
    RECENT_WINDOWS,
    DeviceRelease,
)
from torchmem.sdk.safety.errors import Errors

# While memory is not short, cached segments only age; in effect nothing is collected.
AGING_SHARE = 0.999
# The share that the allocator may keep is set again when it moves by more than this.
MIN_CHANGE = 0.02
MIN_SHARE = 0.01

Devices = Mapping[int, DeviceRelease]
"""Devices by torch's index."""


class TierAction:
    """One tier that is on. A tier overrides the methods that it needs; all others do nothing.

    share: the share of the device below which it acts, 0 for a tier without one.
    """

    tier: ClassVar[ReleaseTier]
    needs_peaks: ClassVar[bool] = False
    """Whether PyTorch's peaks are reset at each window, so that the peak of a window is exact."""
    acts_when_short: ClassVar[bool] = False
    """Whether `relieve` is called for the devices that have less than the share free."""

    def __init__(self, share: float, cache: Cache, errors: Errors) -> None:
        self.share = share
        self.cache = cache
        self.errors = errors

    def end_window(self, device: DeviceRelease, taken: int) -> None:
        """Note the end of a window in which the allocator took these bytes from the driver."""

    def at_step(self, devices: Devices) -> None:
        """Act after a read at the end of a step, when the windows have ended."""

    def relieve(self, short: Devices) -> bool:
        """Release memory where it is short; return whether something was released."""
        raise NotImplementedError

    def at_oom(self, oom: Oom) -> None:
        """Act in the OOM observer."""


class Gradual(TierAction):
    """Has the allocator collect its oldest cached segments while the driver is short of memory."""

    tier = "gradual"

    def __init__(self, share: float, cache: Cache, errors: Errors) -> None:
        super().__init__(share, cache, errors)
        self._kept: dict[int, float] = {}
        self._is_possible = True

    def end_window(self, device: DeviceRelease, taken: int) -> None:
        """Count what was collected, if anything could be."""
        collected = device.collected_bytes()
        if self._kept.get(device.record.device.index, AGING_SHARE) < AGING_SHARE:
            device.account(self.tier).add(collected, taken=taken)

    def at_step(self, devices: Devices) -> None:
        """Move the share above which the allocator collects, unless it has hardly changed."""
        if not self._is_possible:
            return
        kept = {index: self._share_to_keep(device) for index, device in devices.items()}
        shares = {index: share for index, share in kept.items() if share is not None}
        shares |= dict.fromkeys(self._kept.keys() - shares.keys(), AGING_SHARE)
        moved = (abs(share - self._kept.get(index, 2.0)) for index, share in shares.items())
        if max(moved, default=0.0) > MIN_CHANGE:
            self._is_possible = self.cache.backend.collect_above(shares)
            self._kept = shares if self._is_possible else {}
            if not self._is_possible:
                self.errors.log_later(
                    logging.WARNING,
                    "the tier gradual of release is off: it needs the native allocator without "
                    "expandable segments, PyTorch 2.6, and no garbage_collection_threshold of "
                    "your own",
                )

    def _share_to_keep(self, device: DeviceRelease) -> float | None:
        """Return `share_to_keep`; None if it is unknown or the tier is given up."""
        record = device.record
        total, free = record.device.total_bytes, record.driver_free
        if total is None or free is None or device.account(self.tier).given_up:
            return None
        return share_to_keep(total, free, record.reserved_bytes(), self.share)


def share_to_keep(total: int, driver_free: int, reserved: int, share: float) -> float:
    """Return the share of the device that the allocator may hold before it collects.

    It is what the allocator has reserved, minus what the driver lacks to have `share` of the device
    free. All sizes are in bytes.
    """
    wanted = share * total - driver_free
    if wanted <= 0:
        return AGING_SHARE
    return min(AGING_SHARE, max(MIN_SHARE, (reserved - wanted) / total))


class Hooks(TierAction):
    """Calls the pressure hooks for what the driver lacks."""

    tier = "hooks"
    acts_when_short = True

    def relieve(self, short: Devices) -> bool:
        """Call hooks; empty the cache if they free enough to return."""
        wanted = sum(device.missing_bytes(self.share) for device in short.values())
        if not self.cache.hooks.exist:
            return False
        return bool(self.cache.release(self.tier, wanted, min_freed=MIN_RELEASABLE_BYTES)[0])


class EmptyCache(TierAction):
    """Empties the cache, except what the next step is expected to need."""

    tier = "cache"
    needs_peaks = True
    acts_when_short = True

    def relieve(self, short: Devices) -> bool:
        """Empty the cache if that pays on one of the devices."""
        segments = self.cache.snapshot()
        devices = self.cache.memory(short, segments, RECENT_WINDOWS)
        if not any(memory.should_release(self.share) for memory in devices.values()):
            return False
        kept = self.cache.needed_blocks(segments, devices)
        return bool(self.cache.release(self.tier, kept=kept)[0])


class Emergency(TierAction):
    """Releases everything once the script has caught an OutOfMemoryError."""

    tier = "emergency"

    def at_oom(self, oom: Oom) -> None:
        """Wait for the script's main thread to catch the error.

        Does nothing in a thread for which the main thread does not wait, or for a pressure hook
        that runs out of memory.
        """
        failed = oom.failed
        if failed is None or self.cache.hooks.is_running:
            return
        if is_main_thread() or (failed.origin and failed.origin.main_waits):
            self.cache.backend.call_after_oom(lambda: self._after_oom(failed.requested))

    def _after_oom(self, requested: int) -> None:
        with self.errors.suppress("release"):
            if not in_excepthook() and not self.cache.backend.is_capturing():
                self.cache.release(self.tier, requested)


class AskNeighbors(TierAction):
    """Finds the devices for which the neighbors are to be asked; `neighbors.py` asks them."""

    tier = "neighbors"
    needs_peaks = True

    def end_window(self, device: DeviceRelease, taken: int) -> None:  # noqa: ARG002
        """Ask after a window in which the allocator has flushed its cache."""
        if device.neighbor_requests is None:
            device.neighbor_requests, device.wait_seconds = 0, 0.0
        device.is_short = device.has_retried() or device.is_short

    def at_oom(self, oom: Oom) -> None:
        """Ask if memory held by other processes is the cause."""
        seen = oom.observation
        if oom.failed and seen and seen.oom.cause == "external":
            self.cache.devices.by_index()[seen.device].is_short = True


ACTIONS: tuple[type[TierAction], ...] = (Gradual, Hooks, EmptyCache, Emergency, AskNeighbors)
"""In the order in which they act."""
