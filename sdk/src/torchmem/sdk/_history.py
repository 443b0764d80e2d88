"""The setting `history`: PyTorch records the Python stack of each block, for the report of an OOM.

With "oom" it records only while memory may run out soon. Of PyTorch's history only the stacks of
live blocks are recorded (`enabled="state"`), which costs half of a full history and keeps no
entries of freed blocks. A recording of the script's own is left alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torchmem.allocator.backend import Backend
from torchmem.allocator.lines import Uses, grown, uses_by_line
from torchmem.sdk._cost import (
    HISTORY_BUDGET,
    HISTORY_RESERVE_SECONDS,
    RECORDED_ALLOCATION_SECONDS,
    Allowance,
    Cadence,
    CpuMeter,
)
from torchmem.sdk._device import DeviceRecord
from torchmem.sdk._errors import Errors
from torchmem.sdk._oom import OomObservation
from torchmem.sdk._recorder import Recorder
from torchmem.sdk._settings import Settings

# Memory may run out soon if less than this share of the device is left at the peak, ...
LOW_MARGIN = 0.1
# ... or if the fall within the last minutes, continued, leaves nothing within an hour.
TREND_SECONDS = 300.0
MIN_TREND_SECONDS = 60.0
EXHAUSTION_SECONDS = 3600.0
# A smaller fall within these minutes, as a share of the device, is noise.
MIN_FALL = 0.001
POINT_SECONDS = 10.0
# The recording goes on for this time after the last sign.
LINGER_SECONDS = 300.0


def margin(record: DeviceRecord) -> int | None:
    """Return the bytes that the device has left at the peak; None if they are unknown.

    Stranded bytes do not count, because a request may find them too small.
    """
    allocator, free = record.allocator, record.driver_free
    if allocator is None or free is None:
        return None
    stranded = record.layout.stranded_bytes if record.layout else 0
    reserved, peak = allocator.reserved_bytes.total, allocator.active_peak_bytes
    return max(0, reserved + free - peak - stranded)


class Pressure:
    """Tells from the reads of one device whether its memory may run out soon.

    The signs are a retry, a low margin, and a margin that falls fast.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()
        self._retries: int | None = None

    def update(self, now: float, record: DeviceRecord) -> bool:
        """Take one read at `now` (monotonic seconds)."""
        retries, left, total = record.alloc_retries, margin(record), record.device.total_bytes
        retried = self._retries is not None and (retries or 0) > self._retries
        self._retries = retries
        if left is None or not total:
            return retried
        self._add(now, left)
        return retried or left < LOW_MARGIN * total or self._is_falling(now, left, total)

    def _add(self, now: float, left: int) -> None:
        if not self._points or now - self._points[-1][0] >= POINT_SECONDS:
            self._points.append((now, left))
        while now - self._points[0][0] > TREND_SECONDS:
            self._points.popleft()

    def _is_falling(self, now: float, left: int, total: int) -> bool:
        then, before = self._points[0]
        fall = before - left
        if fall < MIN_FALL * total or now - then < MIN_TREND_SECONDS:
            return False
        return left / (fall / (now - then)) < EXHAUSTION_SECONDS


@dataclass(frozen=True, slots=True)
class Look:
    """What the lines of each device held at the end of a step."""

    step: int
    uses: dict[int, Uses]


class LineHistory:
    """Starts and stops the recording of stacks, and compares what the lines held at steps' ends.

    Comparisons are as frequent as snapshots, and cost as much.

    Called in the training thread, or in the main thread between two bytecodes.
    """

    def __init__(
        self,
        settings: Settings,
        recorder: Recorder,
        errors: Errors,
        meter: CpuMeter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._setting = settings.history
        self._recorder = recorder
        self._errors = errors
        self._meter = meter
        self._clock = clock
        self._pressure: dict[int, Pressure] = {}
        self._allowance = Allowance(HISTORY_BUDGET, HISTORY_RESERVE_SECONDS)
        self._cadence = Cadence(settings.snapshot_interval, settings.snapshot_budget)
        self._is_recording = False
        self._allocations = 0
        self._pressing_until = 0.0
        self._first: Look | None = None
        self._last: Look | None = None

    @classmethod
    def from_settings(
        cls, settings: Settings, recorder: Recorder, errors: Errors, meter: CpuMeter
    ) -> LineHistory | None:
        """Return the recording that the settings ask for, or None."""
        return cls(settings, recorder, errors, meter) if settings.history else None

    @property
    def _backend(self) -> Backend:
        return self._recorder.backend

    def begin(self) -> None:
        """Start at the first allocation, unless the start depends on reads."""
        with self._errors.suppress("history"):
            if self._setting is True:
                self._start()

    def after_read(self) -> None:
        """Start or stop after a read of the statistics."""
        with self._errors.suppress("history"):
            now, records = self._clock(), self._recorder.records()
            self._pay(now, records.values())
            wanted = self._is_wanted(now, records.values())
            if self._is_recording and not self._backend.history_enabled():
                self._is_recording = False  # the script has stopped its own, and with it this one
            if self._is_recording and not wanted:
                self.stop()
            elif wanted and not self._is_recording:
                self._start()

    def _is_wanted(self, now: float, records: Iterable[DeviceRecord]) -> bool:
        if self._setting != "oom":
            return self._setting
        pressing = [
            self._pressure.setdefault(record.device.index, Pressure()).update(now, record)
            for record in records
        ]
        if any(pressing):
            self._pressing_until = now + LINGER_SECONDS
        return now < self._pressing_until and self._allowance.is_left(
            now, resuming=not self._is_recording
        )

    def _pay(self, now: float, records: Iterable[DeviceRecord]) -> None:
        """Count what the recording has cost since the last read."""
        allocations = sum(record.allocations for record in records)
        if self._is_recording:
            spent = RECORDED_ALLOCATION_SECONDS * max(0, allocations - self._allocations)
            self._meter.add(spent)
            self._allowance.spend(now, spent)
        self._allocations = allocations

    def _start(self) -> None:
        """Start recording, unless the script records or the allocator cannot."""
        if self._backend.history_enabled() is False:
            self._backend.start_stacks()
            self._is_recording, self._first, self._last = True, None, None

    def stop(self) -> None:
        """Stop the recording of stacks, unless the script has put its own in its place."""
        if self._is_recording:
            self._is_recording = False
            self._backend.stop_stacks()

    def at_step(self, step: int) -> None:
        """Look at the lines at the end of a step, if it is time."""
        now = time.perf_counter()
        if not self._is_recording or not self._cadence.is_due(now):
            return
        with self._errors.suppress("history"):
            segments = self._backend.memory_snapshot()
            if segments is not None:
                devices = self._recorder.records()
                look = Look(step, {index: uses_by_line(segments, index) for index in devices})
                self._first, self._last = self._first or look, look
            ended = time.perf_counter()
            self._cadence.record(ended, ended - now)

    def compared(self, observation: OomObservation) -> OomObservation:
        """Add the lines that grew between the first look and the last."""
        first, last, lines = self._first, self._last, observation.lines
        if lines is None or first is None or last is None or first is last:
            return observation
        device = observation.device
        increases = grown(first.uses.get(device, {}), last.uses.get(device, {}))
        lines = replace(lines, grown=increases, grown_steps=last.step - first.step)
        return replace(observation, lines=lines)
