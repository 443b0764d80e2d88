"""Reads the allocator of every device of this process and keeps what was read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchmem.allocator.backend import Backend, Device, T
from torchmem.allocator.fragmentation import measurement
from torchmem.allocator.headroom import AvailableMemory
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.sample.native_threads import Lock
from torchmem.sample.sample import DeviceSample, Layout, distinct_devices
from torchmem.sdk.components.component_peaks import ComponentPeaks
from torchmem.sdk.components.components import Components
from torchmem.sdk.components.step_trace import Counts, StepTrace
from torchmem.sdk.components.tracked import Moment
from torchmem.sdk.observation import MeasuredSnapshot
from torchmem.sdk.reading.device import DeviceRecord, Flows, flows
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.safety.interruptions import call_holding, call_if_free

OBSERVER_LOCK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RawSnapshot:
    """A snapshot that is not measured yet.

    segments: all segments, in PyTorch's form.
    timestamp: Unix time.
    available: memory that each device could still obtain, by torch's index.
    flows: `flows` of each device, read before the snapshot.
    seconds: time that the snapshot took.
    """

    segments: list[SegmentInfo]
    timestamp: float
    available: Mapping[int, AvailableMemory | None]
    flows: Mapping[int, Flows | None]
    seconds: float


class Recorder:
    """The records of all devices; used by training thread, sampler, and OOM observer."""

    def __init__(self, backend: Backend, errors: Errors | None = None) -> None:
        self.backend = backend
        self.errors = errors or Errors()
        self.components = Components(
            backend.tensor_counter(), self.errors, modules=backend.modules()
        )
        self._peaks = ComponentPeaks()
        self._trace = StepTrace(backend)
        self.settings: dict[str, str] = {}
        self.expandable = False
        self.stats_seconds: float | None = None
        self.read_seconds: float | None = None
        self.snapshot_seconds: float | None = None
        self.oom_seconds: float | None = None
        self._records: dict[int, DeviceRecord] = {}
        self._lock = Lock()
        self._snapshot: RawSnapshot | None = None

    def read_settings(self) -> None:
        """Read the allocator's effective settings unless they are known; snapshots renew them."""
        if not self.settings:
            self._renew_settings()

    def _renew_settings(self) -> None:
        self.settings = dict(self.backend.allocator_settings())
        # Expandable segments remain expandable, and are never part of inactive_split.
        self.expandable = self.expandable or self.settings.get("expandable_segments") != "False"

    def read_stats(self, moment: Moment = "idle") -> None:
        """Read the statistics of every device; return at once when another thread is reading."""
        # A pending call may interrupt this thread within a read: waiting for that would never end.
        call_if_free(self._lock, lambda: self._read(moment))

    def _read(self, moment: Moment) -> None:
        started = time.perf_counter()
        self._read_stats()
        self.stats_seconds = time.perf_counter() - started
        self._read_components(moment)
        self.read_seconds = time.perf_counter() - started

    def _current_stats(self) -> Iterator[tuple[DeviceRecord, NestedStats]]:
        """Yield each device's record and the allocator's statistics now, without keeping them."""
        for index, record in self.records().items():
            stats = self.backend.memory_stats(index)
            if stats:
                yield record, stats

    def _read_stats(self) -> None:
        for device in self.backend.devices():
            record = self._records.setdefault(device.index, DeviceRecord(device))
            stats = self.backend.memory_stats(device.index)
            if stats:
                record.update(stats)
                # Right after the statistics: what others hold is the total minus both.
                free = self.backend.free_bytes(device.index)
                record.update_driver(free, self.backend.limit_bytes(device.index))

    def read_early(self, steps: int) -> None:
        """Take a point of the run's history at a step's end, without a call to the driver."""
        call_if_free(self._lock, lambda: self._read_early(steps))

    def _read_early(self, steps: int) -> None:
        for record, stats in self._current_stats():
            record.keep_peaks(stats)
            record.add_point(steps, stats["allocated_bytes"]["all"]["current"])

    def add_points(self, steps: int) -> None:
        """Take a point of the run's history from what was just read."""
        for record in self.records().values():
            record.add_read_point(steps)

    def read_memory(self) -> None:
        """Read the statistics after a release, in any thread.

        Return at once when another thread is reading. Components are absent until the next full
        read.
        """
        call_if_free(self._lock, self._read_stats)

    @property
    def allocations(self) -> int:
        """How often the allocators of all devices have handed out a block, as of the last read."""
        return sum(record.allocations for record in self.records().values())

    @property
    def has_allocated(self) -> bool:
        """Whether an allocator has ever reserved memory, as far as its statistics show."""
        return any(record.has_allocated for record in self.records().values())

    @property
    def is_outdated(self) -> bool:
        """Whether the allocator has returned memory or taken more since the snapshot."""
        return any(record.is_outdated for record in self.records().values())

    def _read_components(self, moment: Moment) -> None:
        counted: dict[int, dict[str, int]] = {}
        with self.errors.suppress("components"):
            allocators = {
                index: record.allocator
                for index, record in self._records.items()
                if record.allocator
            }
            counted = self.components.read(allocators, moment)
            self._read_component_peaks(counted, moment)
        for index, record in self._records.items():
            record.components = counted.get(index, {})
            peak = (record.allocator.active_peak_bytes or 0) if record.allocator else 0
            record.component_peaks, record.component_peak_time = self._peaks.values(
                index, record.requested_peak, peak
            )

    def _read_component_peaks(self, counted: dict[int, dict[str, int]], moment: Moment) -> None:
        if moment != "step":
            self._trace.cancel_late()
            return
        if self._trace.is_recording:
            for index, peak in self._trace.end(self._counts()).items():
                self._peaks.in_recorded_step(index, peak, counted.get(index))
            self._trace.wait(is_known=all(map(self._peaks.is_exact, self._records)))
        self._peaks.at_step(self._requested_peaks(), counted)

    def _requested(self) -> dict[int, int]:
        known = {index: record.requested for index, record in self._records.items()}
        return {index: requested for index, requested in known.items() if requested is not None}

    def _counts(self) -> Counts:
        records = self._records.items()
        events = {index: record.allocations + record.frees for index, record in records}
        return Counts(self._requested(), events)

    def _requested_peaks(self) -> dict[int, int]:
        return {index: self._records[index].requested_peak for index in self._requested()}

    def before_optimizer(self, optimizer: object, *, has_closure: bool) -> None:
        """Read the peaks before an optimizer's step, and where its gradients are."""
        call_if_free(self._lock, lambda: self._before_optimizer(optimizer, has_closure))

    def _before_optimizer(self, optimizer: object, has_closure: bool) -> None:
        if self._trace.is_recording:
            self._trace.before_optimizer(
                lambda found: self.components.add_gradients(found, optimizer)
            )
        for record, stats in self._current_stats():
            record.keep_peaks(stats)
        gradients = None if has_closure else self.components.all_gradients()
        self._peaks.before_optimizer(self._requested_peaks(), gradients)

    def record_next_step(self) -> None:
        """Record the next step if a recording is due and the components are known."""
        if any(record.components for record in self._records.values()):
            self._trace.begin(self._counts(), self.components.add_gradients)

    def stop_recording(self) -> None:
        """Stop the recording of a step, if there is one."""
        self._trace.cancel()

    def allocated(self) -> dict[int, tuple[int, int]]:
        """Return the allocated bytes of every device, current and peak."""
        allocated = {}
        for record, stats in self._current_stats():
            values = stats["allocated_bytes"]["all"]
            allocated[record.device.index] = (values["current"], values["peak"])
        return allocated

    def allocated_peaks(self) -> dict[int, int]:
        """Return the highest allocated bytes of every device since the process began."""
        self.read_stats()
        return {
            index: record.allocator.allocated_peak_bytes or 0
            for index, record in self.records().items()
            if record.allocator is not None
        }

    def reset_peaks(self) -> None:
        """Reset PyTorch's peaks after taking them into the records' high-water marks."""
        for record, stats in self._current_stats():
            record.keep_peaks(stats)
            self.backend.reset_peaks(record.device.index)

    def take_snapshot(self) -> None:
        """Take a snapshot, with the settings and the available memory at that time.

        If the backend returns none, the previous snapshot stays.
        """
        # The flows first: a block that changes before the snapshot then makes `shows` false, and
        # the snapshot is taken again. In the other order the change would stay unseen.
        started, moved = time.perf_counter(), self._flows()
        segments = self.backend.memory_snapshot()
        if segments is None:
            return
        timestamp = time.time()
        self._renew_settings()
        available = {
            index: self._available(record.device, segments)
            for index, record in self.records().items()
        }
        seconds = time.perf_counter() - started
        self._snapshot = RawSnapshot(segments, timestamp, available, moved, seconds)

    def _flows(self) -> dict[int, Flows | None]:
        return {index: flows(self.backend.memory_stats(index)) for index in self._records}

    def keep_snapshot(self) -> bool:
        """Take the newest snapshot for one of now, right after a read of the statistics.

        Return False, and do nothing, if a block may have changed since then.
        """
        moved, records = self._flows(), self._records
        if not records or not all(each.shows(moved[index]) for index, each in records.items()):
            return False
        for record in records.values():
            record.keep_layout()
        return True

    def _available(self, device: Device, segments: Sequence[SegmentInfo]) -> AvailableMemory | None:
        """Return what the device could still obtain, or None if free memory or limit is unknown."""
        free, limit = self.backend.free_bytes(device.index), self.backend.limit_bytes(device.index)
        if free is None or limit is None or device.total_bytes is None:
            return None
        # Without a limit, the sum over tens of thousands of segments is not needed.
        if limit >= device.total_bytes:
            return AvailableMemory(free)
        reserved = sum(
            segment["total_size"] for segment in segments if segment["device"] == device.index
        )
        return AvailableMemory(free, reserved, limit)

    def obtainable_from_driver(self, device: int) -> int:
        """Return the bytes that this process can still take, within its memory fraction."""
        free = self.backend.free_bytes(device) or 0
        limit, stats = self.backend.limit_bytes(device), self.backend.memory_stats(device)
        if limit is None or not stats:
            return free
        return max(0, min(free, limit - int(stats["reserved_bytes"]["all"]["current"])))

    def measure_snapshot(self) -> MeasuredSnapshot | None:
        """Measure every device in the newest snapshot and return it; None if already measured."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return None
        started = time.perf_counter()
        config = AllocatorConfig.of(self.settings)
        for index, available in snapshot.available.items():
            record = self._records[index]
            record.measured = measurement(
                snapshot.segments, index, snapshot.timestamp, available, config
            )
            # An OOM replaces `measured`, too, and alerts look at layouts of random moments alone.
            record.periodic_layout = record.layout
            record.note_flows(snapshot.flows.get(index))
        self.snapshot_seconds = snapshot.seconds + time.perf_counter() - started
        return MeasuredSnapshot(snapshot.segments, snapshot.timestamp, self._measured(), config)

    def _measured(self) -> list[tuple[Device, Layout]]:
        return [
            (record.device, record.periodic_layout)
            for _, record in sorted(self.records().items())
            if record.periodic_layout is not None
        ]

    def after_oom_read(self, call: Callable[[], T]) -> T:
        """Read the statistics and the components, and call `call` with the lock held.

        For an OOM: another thread may hold the lock for OBSERVER_LOCK_SECONDS at most.
        """

        def read_and_call() -> T:
            self._read_stats()
            self._read_components("oom")
            return call()

        return call_holding(self._lock, OBSERVER_LOCK_SECONDS, read_and_call)

    def records(self) -> dict[int, DeviceRecord]:
        """Return the record of each device by torch's index."""
        return dict(self._records)

    def samples(self) -> tuple[DeviceSample, ...]:
        """Return the distinguishable devices as they are published, by torch's index."""
        records = sorted(self._records.items())
        return distinct_devices(record.sample(expandable=self.expandable) for _, record in records)
