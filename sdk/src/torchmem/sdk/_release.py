"""The setting `release`: return PyTorch's cache to the driver at a step's end if that pays.

docs/release.md explains the conditions and shows a measurement.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.sizes import MIB
from torchmem.sdk._device import DeviceRecord
from torchmem.sdk._errors import Errors
from torchmem.sdk._recorder import Recorder
from torchmem.sdk._settings import Settings

# A release waits for every stream, which does not pay for less memory.
MIN_RELEASABLE_BYTES = 256 * MIB
# The next window is expected to need the highest peak of this many windows.
RECENT_WINDOWS = 3


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


def predicted_peak(windows: Sequence[int]) -> int | None:
    """Return the highest of the recent window peaks, or None if there are too few."""
    return max(windows) if len(windows) >= RECENT_WINDOWS else None


def expected_regrowth(memory: DeviceMemory) -> int:
    """Return the released bytes that the next step would take from the driver again.

    Stranded bytes are not expected to serve it.
    """
    return min(memory.releasable, max(0, memory.next_peak - memory.active))


def should_release(memory: DeviceMemory, share: float) -> bool:
    """Return whether a release pays.

    It does when the driver has less than `share` of the device free and at least half of the
    releasable bytes would stay released.
    """
    return (
        memory.driver_free < share * memory.total
        and memory.releasable >= MIN_RELEASABLE_BYTES
        and 2 * expected_regrowth(memory) <= memory.releasable
    )


class Release:
    """Releases the cache in the training thread, at step ends that have just read statistics.

    `interval` is the shortest time in seconds between two checks. `reset_peaks` starts a new
    window of the peaks.
    """

    def __init__(
        self,
        recorder: Recorder,
        errors: Errors,
        share: float,
        interval: float,
        reset_peaks: Callable[[], None],
    ) -> None:
        self._recorder = recorder
        self._errors = errors
        self._share = share
        self._interval = interval
        self._reset_peaks = reset_peaks
        self._windows: dict[int, deque[int]] = {}
        self._due = 0.0

    @classmethod
    def from_settings(
        cls, settings: Settings, recorder: Recorder, errors: Errors, reset_peaks: Callable[[], None]
    ) -> Release | None:
        """Return a Release, or None if the setting `release` is not set."""
        if settings.release is None:
            return None
        return cls(recorder, errors, settings.release, settings.release_interval, reset_peaks)

    def at_step(self, now: float) -> None:
        """End a window on each device; if one is short of memory, release where that pays."""
        with self._errors.suppress("release"):
            self._check(now)

    def _check(self, now: float) -> None:
        self._reset_peaks()
        records = self._recorder.records()
        for index, record in records.items():
            record.count_release(0, 0)
            windows = self._windows.setdefault(index, deque(maxlen=RECENT_WINDOWS))
            windows.append(record.end_window())
        if now >= self._due and any(
            self._is_short(index, record) for index, record in records.items()
        ):
            self._due = now + self._interval
            if any(should_release(memory, self._share) for memory in self._memory(records)):
                self._release(records)

    def _is_short(self, index: int, record: DeviceRecord) -> bool:
        free, total = self._recorder.backend.free_bytes(index), record.device.total_bytes
        return free is not None and total is not None and free < self._share * total

    def _memory(self, records: dict[int, DeviceRecord]) -> list[DeviceMemory]:
        """Return the memory of each device by a new snapshot.

        The sampler's newest snapshot shows the middle of some step.
        """
        segments = self._recorder.backend.memory_snapshot() or []
        devices = []
        for index, record in records.items():
            free, total = self._recorder.backend.free_bytes(index), record.device.total_bytes
            peak, allocator = predicted_peak(self._windows[index]), record.allocator
            if free is None or total is None or peak is None or allocator is None:
                continue
            releasable = measure(segments, index, time.time()).releasable_bytes
            active = allocator.active_bytes.total
            devices.append(DeviceMemory(total, free, active, releasable, peak))
        return devices

    def _release(self, records: dict[int, DeviceRecord]) -> None:
        before = {index: self._reserved(index) for index in records}
        self._recorder.backend.empty_cache()
        for index, record in records.items():
            returned = before[index] - self._reserved(index)
            if returned > 0:
                record.count_release(1, returned)

    def _reserved(self, index: int) -> int:
        stats = self._recorder.backend.memory_stats(index) or {}
        return int(stats["reserved_bytes"]["all"]["current"]) if stats else 0
