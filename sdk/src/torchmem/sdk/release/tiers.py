"""What each tier of the setting `release` does, and when; docs/release.md explains the conditions.

To add a tier, declare it in `torchmem.sample.release_tiers`, and write a class in `ACTIONS` here.
"""

from __future__ import annotations

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

    def end_window(self, device: DeviceRelease) -> None:
        """Note the end of a window."""

    def relieve(self, short: Devices) -> bool:
        """Release memory where it is short; return whether something was released."""
        raise NotImplementedError

    def at_oom(self, oom: Oom) -> None:
        """Act in the OOM observer."""


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

    def end_window(self, device: DeviceRelease) -> None:
        """Ask after a window in which the allocator has flushed its cache."""
        if device.neighbor_requests is None:
            device.neighbor_requests, device.wait_seconds = 0, 0.0
        device.is_short = device.has_retried() or device.is_short

    def at_oom(self, oom: Oom) -> None:
        """Ask if memory held by other processes is the cause."""
        seen = oom.observation
        if oom.failed and seen and seen.oom.cause == "external":
            self.cache.devices.by_index()[seen.device].is_short = True


ACTIONS: tuple[type[TierAction], ...] = (Hooks, EmptyCache, Emergency, AskNeighbors)
"""In the order in which they act."""
