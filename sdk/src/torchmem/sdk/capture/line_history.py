"""The setting `history`: PyTorch records the Python stack of each block, for the report of an OOM.

With "oom" it records only while memory may run out soon. Of PyTorch's history only the stacks of
live blocks are recorded (`enabled="state"`), which costs half of a full history and keeps no
entries of freed blocks. A recording of the script's own is left alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from torchmem.allocator.backend import Backend
from torchmem.explain.lines import Uses, grown, uses_by_line
from torchmem.sample.run_history import Growth
from torchmem.sdk.capture.pressure import Pressure, StepPressure, is_used_up_soon, margin
from torchmem.sdk.observation import OomObservation
from torchmem.sdk.part import Part, StepAction
from torchmem.sdk.reading.device import DeviceRecord
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.cost import (
    HISTORY_BUDGET,
    HISTORY_RESERVE_SECONDS,
    LOOKS_RESERVE_SECONDS,
    RECORDED_ALLOCATION_SECONDS,
    Allowance,
    Cadence,
    CpuMeter,
)
from torchmem.sdk.safety.errors import Errors, Stage
from torchmem.sdk.settings import Settings

# The recording goes on for this time after the last sign, or the last growth from step to step.
LINGER_SECONDS = 300.0
GROWTH_LINGER_SECONDS = 30.0
# The memory that a step holds at its end has stacks once a whole step was recorded.
STEPS_TO_FIRST_LOOK = 2


@dataclass(frozen=True, slots=True)
class Look:
    """What the lines of each device held at the end of a step."""

    step: int
    uses: dict[int, Uses]


class LineHistory(Part):
    """Starts and stops the recording of stacks, and compares what the lines held at steps' ends.

    Comparisons are as frequent as snapshots, and cost as much; the first ones, at twice as many
    steps each after the start, cost LOOKS_RESERVE_SECONDS in addition.

    `judged` returns what grows on a device by the history of the run.
    """

    stage: Stage = "history"

    def __init__(  # noqa: PLR0913, PLR0917 - each is a collaborator
        self,
        settings: Settings,
        recorder: Recorder,
        errors: Errors,
        meter: CpuMeter,
        judged: Callable[[int], Growth | None] = lambda _device: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._setting = settings.history
        self._recorder = recorder
        self._errors = errors
        self._meter = meter
        self._judged = judged
        self._clock = clock
        self._pressure: dict[int, Pressure] = {}
        self._growth: dict[int, StepPressure] = {}
        self._allowance = Allowance(HISTORY_BUDGET, HISTORY_RESERVE_SECONDS)
        self._cadence = Cadence(settings.snapshot_interval, settings.snapshot_budget)
        self._looks = Allowance(settings.snapshot_budget, LOOKS_RESERVE_SECONDS)
        self._is_recording = False
        self._step = 0
        self._started_step = 0
        self._next_look = math.inf
        self._allocations = 0
        self._pressing_until = 0.0
        self._first: Look | None = None
        self._last: Look | None = None

    @property
    def _backend(self) -> Backend:
        return self._recorder.backend

    @property
    def due_step(self) -> float:
        """The next step at whose end the lines are to be compared."""
        return self._next_look if self._is_recording else math.inf

    def at_step(self) -> StepAction:
        """Ask for a read, after which the lines are compared."""
        return "watch"

    def begin(self) -> None:
        """Start at the first allocation, unless the start depends on reads."""
        if self._setting is True:
            self._start()

    def after_read(self, step: int | None) -> None:
        """Start or stop, by what was read, and look at the lines if it is time."""
        self._step = self._step if step is None else step
        now, records = self._clock(), self._recorder.records()
        self._pay(now, records.values())
        wanted = self._is_wanted(now, records.values(), at_step=step is not None)
        self._is_recording = self._backend.owns_history() and self._is_recording
        if self._is_recording and not wanted:
            self._stop()
        elif wanted and not self._is_recording:
            self._start()
        if step is not None:
            self._look_if_due()

    def at_early_read(self, step: int) -> None:
        """Start if the run's history, which has a new point, shows growth."""
        if self._setting != "oom" or self._is_recording:
            return
        self._step, now = step, self._clock()
        grown = [self._grows(now, record) for record in self._recorder.records().values()]
        if any(grown):
            self._pressing_until = now + GROWTH_LINGER_SECONDS
            self._start()

    def _is_wanted(self, now: float, records: Collection[DeviceRecord], *, at_step: bool) -> bool:
        if self._setting != "oom":
            return self._setting
        grown = [at_step and self._grows(now, record) for record in records]
        if any(grown):
            self._pressing_until = max(self._pressing_until, now + GROWTH_LINGER_SECONDS)
        pressing = [self._is_pressing(now, record) for record in records]
        if any(pressing):
            self._pressing_until = now + LINGER_SECONDS
        return now < self._pressing_until and self._allowance.is_left(
            now, resuming=not self._is_recording
        )

    def _is_pressing(self, now: float, record: DeviceRecord) -> bool:
        index = record.device.index
        is_low = self._pressure.setdefault(index, Pressure()).update(now, record)
        return is_low or is_used_up_soon(record, self._judged(index))

    def _grows(self, now: float, record: DeviceRecord) -> bool:
        point, total = record.run_history.newest, record.device.total_bytes
        left = None if point is None else margin(record, point.peak)
        if point is None or left is None or not total:
            return False
        growth = self._growth.setdefault(record.device.index, StepPressure())
        return growth.update(self._step, now, point.allocated, point.peak, left, total)

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
        if self._backend.history_enabled() is False and self._backend.start_stacks():
            self._is_recording, self._first, self._last = True, None, None
            self._started_step = self._step
            self._next_look = self._step + STEPS_TO_FIRST_LOOK

    def _stop(self) -> None:
        """Stop the recording of stacks, unless the script has put its own in its place."""
        if self._is_recording:
            self._is_recording = False
            self._backend.stop_history()

    def stop(self) -> None:
        """Stop, so that another recording can start."""
        with self._errors.suppress("history"):
            self._stop()

    def end(self, *, may_read: bool) -> None:
        """Stop."""
        if may_read:
            self._stop()

    def _look_if_due(self) -> None:
        now = time.perf_counter()
        if not self._is_recording or not self._is_look_due(now):
            return
        self._next_look = math.inf
        self._look()
        ended = time.perf_counter()
        self._cadence.record(ended, ended - now)
        self._looks.spend(ended, ended - now)
        if self._looks.is_left(ended, resuming=False):
            self._next_look = 2 * self._step - self._started_step

    def _is_look_due(self, now: float) -> bool:
        if self._step < self._started_step + STEPS_TO_FIRST_LOOK:
            return False
        return self._step >= self._next_look or self._cadence.is_due(now)

    def _look(self) -> None:
        segments = self._backend.memory_snapshot()
        if segments is not None:
            devices = self._recorder.records()
            look = Look(self._step, {index: uses_by_line(segments, index) for index in devices})
            self._first, self._last = self._first or look, look

    def compared(self, observation: OomObservation) -> OomObservation:
        """Add the lines that grew between the first look and the last."""
        first, last, lines = self._first, self._last, observation.lines
        if lines is None or first is None or last is None or first is last:
            return observation
        device = observation.device
        increases = grown(first.uses.get(device, {}), last.uses.get(device, {}))
        lines = replace(lines, grown=increases, grown_steps=last.step - first.step)
        return replace(observation, lines=lines)
