"""When the steps that were asked for are over, with one optimizer or several.

Which phase of a training step the process is in.

What one card's memory does from phase to phase and from step to step. All sizes are bytes.

Watches the memory of the script's process, ends it when the steps are over, and writes the report.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.preflight.child._torch import WatchedBackend, cards_without_kernels, is_out_of_memory
from torchmem.preflight.child.ending import (
    Report,
    leave,
    most_host_bytes,
    stop,
    values_read,
    write_report,
    write_trace,
)
from torchmem.preflight.outcome import DeviceMemory, Phase, StepMemory
from torchmem.preflight.plan import PROGRESS_FILE, Orders
from torchmem.sdk import Session
from torchmem.sdk.steps import Iterations
from torchmem.sdk.torch_backend import NO_CACHING


class StepCounter:
    """Counts training iterations; see `torchmem.sdk.steps.Iterations` for what is one with several optimizers."""

    def __init__(self, wanted: int) -> None:
        self.count = 0
        self._wanted = wanted
        self._iterations = Iterations()
        self._all: set[int] = set()
        self._this: set[int] = set()

    def stepped(self, optimizer: int) -> None:
        """An optimizer, named by a number, has stepped."""
        if self._iterations.begins(optimizer):
            self.count += 1
            self._this = set()
        self._this.add(optimizer)
        self._all.add(optimizer)

    def called(self) -> None:
        """The script itself says that a step is over."""
        self.count += 1

    @property
    def is_complete(self) -> bool:
        """Whether every optimizer seen so far has stepped in this iteration."""
        return self._this == self._all

    @property
    def is_over(self) -> bool:
        """Whether as many iterations as wanted have begun."""
        return self.count >= self._wanted


class PhaseClock:
    """Told by the hooks of PyTorch; calls `turn` with the phase that ends whenever another one begins.

    A backward inside a backward (checkpointing) and an optimizer inside one (fused into it) belong to the outer one.
    """

    def __init__(self, turn: Callable[[Phase], None]) -> None:
        self.now: Phase = "setup"
        self._turn = turn
        self._depth = 0
        self._updates_after_backward = False
        self._lock = threading.Lock()

    @property
    def in_backward(self) -> bool:
        """Whether a backward is going on."""
        return self._depth > 0

    def forward(self) -> None:
        """A module is called for the first time, or a step is over."""
        self._updates_after_backward = False
        self._go("forward")

    def backward_begins(self) -> None:
        """Called for inner ones too."""
        with self._lock:
            self._depth += 1
            outermost = self._depth == 1
        if outermost:
            self._go("backward")

    def backward_ends(self) -> None:
        """Called for inner ones too."""
        with self._lock:
            self._depth -= 1
            outermost = self._depth == 0
        if outermost:
            self._go("optimizer" if self._updates_after_backward else "forward")

    def optimizer(self, has_closure: bool) -> None:
        """An optimizer begins to step; with a closure it runs forward and backward first, as Lightning has it."""
        self._updates_after_backward = has_closure
        if not self._depth and not has_closure:
            self._go("optimizer")

    def _go(self, phase: Phase) -> None:
        ended, self.now = self.now, phase
        self._turn(ended)


@dataclass(slots=True)
class Meter:
    """High-water marks of one device; fed with statistics whose peaks count since the last feeding."""

    device: int
    peak_allocated: int = 0
    peak_reserved: int = 0
    peak_step: int = 0
    peak_phase: Phase = "setup"
    stranded: int = 0
    phase_peaks: dict[Phase, int] = field(default_factory=dict)
    steps: list[StepMemory] = field(default_factory=list)
    _step_allocated: int = 0
    _step_reserved: int = 0

    def phase_ended(self, phase: Phase, step: int, stats: NestedStats) -> None:
        """A window within step number `step` is over."""
        allocated = int(stats["allocated_bytes"]["all"]["peak"])
        reserved = int(stats["reserved_bytes"]["all"]["peak"])
        if allocated > self.peak_allocated:
            self.peak_allocated, self.peak_step, self.peak_phase = allocated, step, phase
        self.peak_reserved = max(self.peak_reserved, reserved)
        self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), allocated)
        self._step_allocated = max(self._step_allocated, allocated)
        self._step_reserved = max(self._step_reserved, reserved)

    def step_ended(self, step: int, allocated: int, stranded: int) -> None:
        """Step number `step` is over, its last window was fed, and this is left.

        Called again for the same step when another optimizer steps in it.
        """
        before = (
            self.steps.pop()
            if self.steps and self.steps[-1].step == step
            else StepMemory(step, 0, 0, 0)
        )
        peak_allocated = max(before.peak_allocated, self._step_allocated)
        self.steps.append(
            StepMemory(
                step, peak_allocated, max(before.peak_reserved, self._step_reserved), allocated
            )
        )
        self._step_allocated = self._step_reserved = 0
        self.stranded = max(self.stranded, stranded)

    def memory(self, stats: NestedStats, total: int, outside: int) -> DeviceMemory:
        """All of it, with the counters of the newest statistics."""
        return DeviceMemory(
            device=self.device,
            total=total,
            outside=outside,
            peak_allocated=self.peak_allocated,
            peak_reserved=self.peak_reserved,
            peak_step=self.peak_step,
            peak_phase=self.peak_phase,
            stranded=self.stranded,
            retries=int(stats["num_alloc_retries"]),
            ooms=int(stats["num_ooms"]),
            device_allocs=int(stats.get("num_device_alloc", 0)),
            phase_peaks=tuple(self.phase_peaks.items()),
            steps=tuple(self.steps),
        )


MOST_EVENTS = 2_000_000
"""Of the trace of each card; an event takes about 1.2 KiB of RAM, most of it when the trace is written at the end."""


class Watch:
    """Everything happens in the script's own threads, at PyTorch's hooks."""

    def __init__(self, backend: WatchedBackend, session: Session, orders: Orders) -> None:
        self.phases = PhaseClock(self._phase_ended)
        self._backend = backend
        self._session = session
        self._orders = orders
        self._counter = StepCounter(orders.steps)
        self._meters: dict[int, Meter] = {}
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._step = 1
        self._ooms_at_step = 0
        self._has_trace = False
        self._has_ended = False
        self._steps_by_hand = False
        self._stepped_in_backward = False

    def cuda_is_up(self) -> None:
        """Record the trace from the first allocation on, unless the script does so itself."""
        lacking = cards_without_kernels()
        if lacking:
            stop(
                f"this build of PyTorch has no code for {lacking[0]}: install a build for another CUDA version."
            )
        if self._backend.history_enabled() is None or any(
            name in os.environ for name in NO_CACHING
        ):
            stop(
                "a preflight watches PyTorch's own caching allocator, which this run does not use: leave out "
                f"backend:cudaMallocAsync, a CUDAPluggableAllocator and {NO_CACHING[0]}."
            )
        self._pid = os.getpid()
        if self._backend.history_enabled() is False:
            self._backend.start_history(MOST_EVENTS)
        self._has_trace = bool(self._backend.history_enabled())

    def optimizer_stepped(self, optimizer: int) -> None:
        """After every optimizer's step; those within a backward count when it is over."""
        if self._steps_by_hand or not self._is_own:
            return
        self._counter.stepped(optimizer)
        if self.phases.in_backward:
            self._stepped_in_backward = True
        else:
            self._iteration_may_end()

    def backward_ended(self) -> None:
        """After every backward, inner ones included."""
        self.phases.backward_ends()
        if self._stepped_in_backward and not self.phases.in_backward:
            self._stepped_in_backward = False
            self._iteration_may_end()

    def step_called(self) -> None:
        """After the script's own `Session.step()`; from then on no optimizer's step counts."""
        self._steps_by_hand = True
        if self._is_own:
            self._counter.called()
            self._step_ended()

    def script_ended(self) -> None:
        """At the end of the process: the script came to its own, or an error was not caught."""
        if self._is_own and self._backend.is_initialized() and not self._has_ended:
            self._has_ended = True
            self._phase_ended(self.phases.now)
            self._write(stopped=False)

    @property
    def _is_own(self) -> bool:
        """False in a forked child, unless CUDA has come up there."""
        return os.getpid() == self._pid

    def _iteration_may_end(self) -> None:
        if self._counter.is_complete:
            self._step_ended()

    def _step_ended(self) -> None:
        self._step = self._counter.count
        self.phases.forward()
        self._measure()
        self._tell()
        self._step += 1
        if self._counter.is_over:
            self._write(stopped=True)
            self._session.close()
            leave(0)

    def _phase_ended(self, phase: Phase) -> None:
        if not (self._is_own and self._backend.is_initialized()):
            return
        with self._lock:
            for device in self._backend.devices():
                stats = self._backend.window_stats(device.index)
                if stats:
                    meter = self._meters.setdefault(device.index, Meter(device.index))
                    meter.phase_ended(phase, 0 if phase == "setup" else self._step, stats)
                    self._backend.reset_peaks(device.index)

    def _measure(self) -> None:
        """What is left at the end of a step."""
        segments = self._segments()
        for index, meter in self._meters.items():
            stats = self._backend.window_stats(index)
            if stats:
                layout = measure(segments, index, 0.0)
                meter.step_ended(
                    self._counter.count,
                    stats["allocated_bytes"]["all"]["current"],
                    layout.stranded_bytes,
                )
        self._ooms_at_step = self._ooms()

    def _segments(self) -> list[SegmentInfo]:
        """Before PyTorch 2.11 a snapshot brings the whole trace along, so the SDK takes none while one is recorded."""
        segments = self._backend.memory_snapshot()
        if segments is None and self._has_trace:
            segments = (self._backend.full_snapshot(traces=True) or {}).get("segments")
        return segments or []

    def _tell(self) -> None:
        """One line for the parent: the step, and the most that any card held."""
        allocated = max((meter.peak_allocated for meter in self._meters.values()), default=0)
        reserved = max((meter.peak_reserved for meter in self._meters.values()), default=0)
        with (self._orders.folder / PROGRESS_FILE).open("a") as file:
            file.write(f"{self._counter.count} {allocated} {reserved}\n")

    def _write(self, *, stopped: bool) -> None:
        """The trace, and then the report, which tells what RAM it took."""
        snapshot = self._backend.full_snapshot(traces=True) if self._has_trace else None
        if snapshot is not None:
            write_trace(self._orders.folder, snapshot)
        uncaught = getattr(sys, "last_value", None)
        report = Report(
            stopped=stopped,
            steps=self._counter.count,
            out_of_memory=is_out_of_memory(uncaught)
            or (not stopped and self._ooms() > self._ooms_at_step),
            message=None if uncaught is None else str(uncaught),
            devices=tuple(
                memory for meter in self._meters.values() if (memory := self._memory(meter))
            ),
            host_bytes=most_host_bytes(),
            values_read=values_read(),
        )
        write_report(self._orders.folder, report)

    def _memory(self, meter: Meter) -> DeviceMemory | None:
        stats = self._backend.window_stats(meter.device)
        total = {device.index: device.total_bytes for device in self._backend.devices()}.get(
            meter.device
        )
        free = self._backend.free_bytes(meter.device)
        if not stats or total is None or free is None:
            return None
        outside = total - free - int(stats["reserved_bytes"]["all"]["current"])
        return meter.memory(stats, total, outside)

    def _ooms(self) -> int:
        stats = (self._backend.window_stats(index) for index in self._meters)
        return sum(int(found["num_ooms"]) for found in stats if found)
