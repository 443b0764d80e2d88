"""Dynamic release, opt-in: return the cache at a step's end when the card is full and the next step allows it."""

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

# Less is not worth waiting for every stream, which a release does.
MIN_RELEASABLE_BYTES = 256 * MIB
# So many windows must have been seen, and the highest of them is what the next one is expected to need.
RECENT_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class Holdings:
    """One device at the end of a step, in bytes. `next_peak`: active bytes that the next step is expected to reach."""

    total: int
    driver_free: int
    active: int
    releasable: int
    next_peak: int


def predicted_peak(windows: Sequence[int]) -> int | None:
    """The highest of the newest window peaks; None while too few are known."""
    return max(windows) if len(windows) >= RECENT_WINDOWS else None


def taken_back(holdings: Holdings) -> int:
    """Bytes that the next step would take from the driver again; stranded bytes are not counted on to serve it."""
    return min(holdings.releasable, max(0, holdings.next_peak - holdings.active))


def pays(holdings: Holdings, share: float) -> bool:
    """Whether to release: driver free is under `share` of the device, and at least half of it would stay returned."""
    return (
        holdings.driver_free < share * holdings.total
        and holdings.releasable >= MIN_RELEASABLE_BYTES
        and 2 * taken_back(holdings) <= holdings.releasable
    )


class Release:
    """Acts in the training thread, at the end of a step whose statistics were just read."""

    def __init__(
        self,
        recorder: Recorder,
        errors: Errors,
        share: float,
        interval: float,
        reset_peaks: Callable[[], None],
    ) -> None:
        """`interval`: least seconds between two looks; `reset_peaks` begins a new window of the peaks."""
        self._recorder = recorder
        self._errors = errors
        self._share = share
        self._interval = interval
        self._reset_peaks = reset_peaks
        self._windows: dict[int, deque[int]] = {}
        self._due = 0.0

    @classmethod
    def wanted(
        cls, settings: Settings, recorder: Recorder, errors: Errors, reset_peaks: Callable[[], None]
    ) -> Release | None:
        """What the settings ask for: None unless `release` is set."""
        if settings.release is None:
            return None
        return cls(recorder, errors, settings.release, settings.release_interval, reset_peaks)

    def at_step(self, now: float) -> None:
        """End a window on each device and, at most once in `interval`, release if that pays on any of them."""
        with self._errors.swallow("release"):
            self._look(now)

    def _look(self, now: float) -> None:
        self._reset_peaks()
        records = self._recorder.records()
        for index, record in records.items():
            record.count_release(0, 0)
            self._windows.setdefault(index, deque(maxlen=RECENT_WINDOWS)).append(
                record.end_window()
            )
        if now >= self._due and any(
            self._is_short(index, record) for index, record in records.items()
        ):
            self._due = now + self._interval
            if any(pays(holdings, self._share) for holdings in self._holdings(records)):
                self._release(records)

    def _is_short(self, index: int, record: DeviceRecord) -> bool:
        free, total = self._recorder.backend.free_bytes(index), record.device.total_bytes
        return free is not None and total is not None and free < self._share * total

    def _holdings(self, records: dict[int, DeviceRecord]) -> list[Holdings]:
        """A snapshot of this very moment: the newest of the sampler was taken in the middle of some step."""
        segments = self._recorder.backend.memory_snapshot() or []
        found = []
        for index, record in records.items():
            free, total = self._recorder.backend.free_bytes(index), record.device.total_bytes
            peak = predicted_peak(self._windows[index])
            if (
                free is not None
                and total is not None
                and peak is not None
                and record.allocator is not None
            ):
                releasable = measure(segments, index, time.time()).releasable_bytes
                found.append(
                    Holdings(total, free, record.allocator.active_bytes.total, releasable, peak)
                )
        return found

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
