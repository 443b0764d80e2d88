"""Reads the allocator of every device of this process and keeps what was read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchmem.core.backend import Backend
from torchmem.core.fragmentation import Room, measure
from torchmem.core.oom import OomFacts, classify
from torchmem.core.sample import DeviceSample, Oom
from torchmem.sdk._device import DeviceRecord

OBSERVER_LOCK_SECONDS = 1.0


class Recorder:
    """One record for each device; may be called from the training thread, the sampler and the OOM observer."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.settings: dict[str, str] = {}
        self.stats_seconds: float | None = None
        self.snapshot_seconds: float | None = None
        self._records: dict[int, DeviceRecord] = {}
        self._lock = threading.Lock()

    @property
    def expandable(self) -> bool:
        """Whether expandable segments are on, by the allocator's own account."""
        return self.settings.get("expandable_segments") == "True"

    def read_settings(self) -> None:
        """Take the allocator's effective settings."""
        self.settings = dict(self.backend.allocator_settings())

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

    def read_snapshot(self) -> None:
        """Take one snapshot and measure every device by it; keeps the old layout where there is none."""
        started = time.perf_counter()
        segments = self.backend.memory_snapshot()
        if segments is None:
            return
        timestamp = time.time()
        for index, record in list(self._records.items()):
            record.layout = measure(segments, index, timestamp, self._room(index))
        self.snapshot_seconds = time.perf_counter() - started

    def _room(self, device: int) -> Room | None:
        free = self.backend.free_bytes(device)
        if free is None:
            return None
        limit = self.backend.limit_bytes(device)
        return Room(free, 0 if limit is None else self._reserved(device), limit)

    def _reserved(self, device: int) -> int:
        stats = self.backend.memory_stats(device) or {}
        return int(stats["reserved_bytes"]["all"]["current"]) if stats else 0

    def record_oom(self, device: int, requested: int, limit: int, driver_free: int) -> None:
        """Called inside the allocator's OOM observer: count it, name its cause, read the state it left."""
        with self._reading(OBSERVER_LOCK_SECONDS):
            self._read_stats()
            record = self._records[device]
            reserved = record.allocator.reserved_bytes.total if record.allocator else 0
            segments = self.backend.memory_snapshot()
            if segments is not None:
                record.layout = measure(segments, device, time.time(), Room(driver_free, reserved, limit))
            facts = OomFacts(
                requested=requested,
                limit=limit,
                driver_free=driver_free,
                cached_free=record.layout.free_bytes if record.layout else 0,
                reserved=reserved,
                total=record.device.total_bytes,
            )
            record.record_oom(Oom(time.time(), requested, classify(facts)))

    @contextmanager
    def _reading(self, timeout: float) -> Iterator[bool]:
        mine = self._lock.acquire(timeout=timeout) if timeout else self._lock.acquire(blocking=False)
        try:
            yield mine
        finally:
            if mine:
                self._lock.release()

    def samples(self) -> tuple[DeviceSample, ...]:
        """All devices as they are published, in the order of torch's index."""
        records = sorted(self._records.items())
        return tuple(record.sample(expandable=self.expandable) for _, record in records)
