"""Reads the allocator of every device of this process and keeps what was read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torchmem.allocator.backend import Backend, Device
from torchmem.allocator.fragmentation import measure
from torchmem.allocator.headroom import AvailableMemory
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.sample.sample import DeviceSample, distinct_devices
from torchmem.sdk._device import DeviceRecord
from torchmem.sdk._oom import Observed, Scene, examine

OBSERVER_LOCK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot that is not yet measured: segments, Unix time, room by torch's index, seconds it took."""

    segments: list[SegmentInfo]
    timestamp: float
    rooms: Mapping[int, AvailableMemory | None]
    seconds: float


class Recorder:
    """One record for each device; may be called from the training thread, the sampler and the OOM observer."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.settings: dict[str, str] = {}
        self.expandable = False
        self.stats_seconds: float | None = None
        self.snapshot_seconds: float | None = None
        self.oom_seconds: float | None = None
        self._records: dict[int, DeviceRecord] = {}
        self._lock = threading.Lock()
        self._moment: Moment | None = None

    def read_settings(self) -> None:
        """Take the allocator's effective settings, once; each snapshot brings them anew."""
        if not self.settings:
            self._take_settings()

    def _take_settings(self) -> None:
        self.settings = dict(self.backend.allocator_settings())
        # Segments that were once expandable stay so, and stay out of inactive_split.
        self.expandable = self.expandable or self.settings.get("expandable_segments") != "False"

    def read_stats(self) -> None:
        """Read the nested statistics of every device; returns at once when another thread is reading."""
        with self._reading(0) as mine:
            if mine:
                started = time.perf_counter()
                self._read_stats()
                self.stats_seconds = time.perf_counter() - started

    def _read_stats(self) -> None:
        for device in self.backend.devices():
            record = self._records.setdefault(device.index, DeviceRecord(device))
            record.read(self.backend.memory_stats(device.index) or {})

    def allocated(self) -> dict[int, tuple[int, int]]:
        """Allocated bytes of every device, now and at their peak."""
        stats = {index: self.backend.memory_stats(index) for index in list(self._records)}
        values = {index: found["allocated_bytes"]["all"] for index, found in stats.items() if found}
        return {index: (value["current"], value["peak"]) for index, value in values.items()}

    def record_phase(self, device: int, name: str, peak: int) -> None:
        """Remember the highest allocated bytes of a phase."""
        peaks = self._records[device].phase_peaks
        peaks[name] = max(peaks.get(name, 0), peak)

    def reset_peaks(self) -> None:
        """Reset PyTorch's peaks once they are in our own high-water marks."""
        self.read_stats()
        for index in list(self._records):
            self.backend.reset_peaks(index)

    def take_snapshot(self) -> None:
        """Take one snapshot and what must be known of the same moment; keeps the old one where there is none."""
        started = time.perf_counter()
        segments = self.backend.memory_snapshot()
        if segments is None:
            return
        timestamp = time.time()
        self._take_settings()
        rooms = {
            index: self._room(record.device, segments) for index, record in self.records().items()
        }
        self._moment = Moment(segments, timestamp, rooms, time.perf_counter() - started)

    def measure_snapshot(self) -> bool:
        """Measure every device by the snapshot that was taken last; False when that was done already."""
        moment, self._moment = self._moment, None
        if moment is None:
            return False
        started = time.perf_counter()
        config = AllocatorConfig.of(self.settings)
        for index, room in moment.rooms.items():
            layout = measure(moment.segments, index, moment.timestamp, room, config)
            self._records[index].layout = self._records[index].periodic_layout = layout
        self.snapshot_seconds = moment.seconds + time.perf_counter() - started
        return True

    def _room(self, device: Device, segments: Sequence[SegmentInfo]) -> AvailableMemory | None:
        """None where the driver's free memory or the limit is unknown, and with it the headroom."""
        free, limit = self.backend.free_bytes(device.index), self.backend.limit_bytes(device.index)
        if free is None or limit is None or device.total_bytes is None:
            return None
        reserved = sum(
            segment["total_size"] for segment in segments if segment["device"] == device.index
        )
        return (
            AvailableMemory(free, reserved, limit)
            if limit < device.total_bytes
            else AvailableMemory(free)
        )

    def record_oom(self, device: int, requested: int, limit: int, driver_free: int) -> Scene:
        """Called inside the allocator's OOM observer: count it, name its cause, read the state it left."""
        with self._reading(OBSERVER_LOCK_SECONDS):
            self._read_stats()
            observed = Observed(requested, limit, driver_free)
            return examine(
                self.backend, self._records[device], AllocatorConfig.of(self.settings), observed
            )

    @contextmanager
    def _reading(self, timeout: float) -> Iterator[bool]:
        mine = (
            self._lock.acquire(timeout=timeout) if timeout else self._lock.acquire(blocking=False)
        )
        try:
            yield mine
        finally:
            if mine:
                self._lock.release()

    def records(self) -> dict[int, DeviceRecord]:
        """What is remembered of each device, by torch's index."""
        return dict(self._records)

    def samples(self) -> tuple[DeviceSample, ...]:
        """The devices that can be told apart, as they are published, in the order of torch's index."""
        records = sorted(self._records.items())
        return distinct_devices(record.sample(expandable=self.expandable) for _, record in records)
