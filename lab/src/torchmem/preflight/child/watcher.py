"""Measures the memory of the script's process step by step, and ends it after the planned steps.

All sizes are bytes.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.settings import NO_CACHING
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.preflight.child.exit import (
    leave,
    peak_host_bytes,
    stop,
    values_read,
    write_report,
    write_trace,
)
from torchmem.preflight.child.marks import TraceMarks
from torchmem.preflight.child.meter import DeviceMeter
from torchmem.preflight.child.phases import PhaseTracker, StepCounter
from torchmem.preflight.child.torch_hooks import (
    WatchedBackend,
    clear_cublas_workspaces,
    gpus_without_kernels,
    is_out_of_memory,
)
from torchmem.preflight.child.uses import SourceLines, repository, with_rounding
from torchmem.preflight.plan import PROGRESS_FILE, ChildConfig
from torchmem.preflight.result import GpuMemory, Phase, ProcessReport
from torchmem.sdk import Session

MAX_TRACE_EVENTS = 2_000_000
"""Per GPU. An event takes about 1.2 KiB of RAM, mostly while the trace is written at the end."""
MAX_CALLS = 1000
"""Calls of a model without training that are measured one by one."""


class StepWatcher:
    """Measures memory at PyTorch's hooks, in the script's own threads."""

    def __init__(self, backend: WatchedBackend, session: Session, config: ChildConfig) -> None:
        self.phases = PhaseTracker(self._phase_changed)
        self.marks = TraceMarks(backend, clear_cublas_workspaces)
        self._backend = backend
        self._session = session
        self._config = config
        self._counter = StepCounter(config.steps)
        self._meters: dict[int, DeviceMeter] = {}
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._step = 1
        self._ooms_at_step = 0
        self._has_trace = self._has_own_trace = False
        self._has_ended = False
        self._script_reports_steps = False
        self._stepped_in_backward = False
        self._calls = 0
        self._has_trained = False

    def cuda_initialized(self) -> None:
        """Record the trace from the first allocation on, unless the script already does."""
        unsupported = gpus_without_kernels()
        if unsupported:
            stop(
                f"this build of PyTorch has no kernels for {unsupported[0]}: install a build for "
                "another CUDA version."
            )
        recording = self._backend.history_enabled()
        if recording is None or any(name in os.environ for name in NO_CACHING):
            stop(
                "a preflight measures PyTorch's own caching allocator, which this run does not "
                "use: remove backend:cudaMallocAsync, CUDAPluggableAllocator or "
                f"{NO_CACHING[0]}."
            )
        self._pid = os.getpid()
        if recording is False:
            self._backend.start_history(MAX_TRACE_EVENTS)
            self._has_own_trace = True
        self._has_trace = bool(self._backend.history_enabled())

    def optimizer_stepped(self, optimizer: object) -> None:
        """Handle an optimizer's step. Inside a backward pass it counts when that ends."""
        if self._script_reports_steps or not self._is_own_process:
            return
        self._begin_training()
        self._counter.optimizer_stepped(optimizer)
        if self.phases.in_backward:
            self._stepped_in_backward = True
        else:
            self._end_step_if_complete()

    def forward_ended(self) -> bool:
        """Handle the end of a call of the model; return False if calls no longer matter.

        They are the steps of a script that does not train.
        """
        if self._has_trained or not (self._is_own_process and self._backend.is_initialized()):
            return not self._has_trained
        self._calls += 1
        if self._calls <= MAX_CALLS:
            self._step = self._calls
            self._phase_ended("forward")
            self._measure(self._calls)
        return True

    def backward_begins(self) -> None:
        """Handle the start of a backward pass, which may be an inner one."""
        self._begin_training()
        self.phases.backward_begins()

    def backward_ended(self) -> None:
        """Handle the end of a backward pass, which may be an inner one."""
        self.phases.backward_ends()
        if self._is_own_process and not self.phases.in_backward:
            self.marks.backward_ended()
        if self._stepped_in_backward and not self.phases.in_backward:
            self._stepped_in_backward = False
            self._end_step_if_complete()

    def step_called(self) -> None:
        """Handle the script's own `Session.step()`, after which optimizer steps no longer count."""
        self._script_reports_steps = True
        if self._is_own_process:
            self._begin_training()
            self._counter.step_called()
            self._end_step()

    def script_ended(self) -> None:
        """Write the report at the end of the process, after its last line or an uncaught error."""
        if self._is_own_process and self._backend.is_initialized() and not self._has_ended:
            self._has_ended = True
            self._phase_ended(self.phases.phase)
            self._write(stopped=False)

    @property
    def _is_own_process(self) -> bool:
        """False in a forked child, unless CUDA was initialized there."""
        return os.getpid() == self._pid

    def _begin_training(self) -> None:
        """Stop counting calls of the model, which are part of a training step."""
        if self._has_trained:
            return
        self._has_trained, self._calls, self._step = True, 0, 1
        for meter in self._meters.values():
            meter.forget_steps()

    def _end_step_if_complete(self) -> None:
        if self._counter.is_complete:
            self._end_step()

    def _end_step(self) -> None:
        self._step = self._counter.count
        self.phases.forward()
        self.marks.step_ended()
        self._measure(self._counter.count)
        self._write_progress()
        self._step += 1
        if self._counter.has_reached_limit:
            self._write(stopped=True)
            self._session.close()
            leave(0)

    def _phase_changed(self, ended: Phase) -> None:
        self._phase_ended(ended)
        if self._is_own_process:
            self.marks.phase_begins(self.phases.phase)

    def _phase_ended(self, phase: Phase) -> None:
        if not (self._is_own_process and self._backend.is_initialized()):
            return
        with self._lock:
            for device in self._backend.devices():
                stats = self._backend.window_stats(device.index)
                if stats:
                    meter = self._meters.setdefault(device.index, DeviceMeter(device.index))
                    meter.phase_ended(phase, 0 if phase == "setup" else self._step, stats)
                    self._backend.reset_peaks(device.index)

    def _measure(self, step: int) -> None:
        """Measure what remains allocated at the end of step or call `step`."""
        segments = self._segments()
        for index, meter in self._meters.items():
            stats = self._backend.window_stats(index)
            if stats:
                allocated = stats["allocated_bytes"]["all"]["current"]
                stranded = measure(segments, index, 0.0).stranded_bytes
                meter.step_ended(step, allocated, stranded)
        self._ooms_at_step = self._ooms()

    def _segments(self) -> list[SegmentInfo]:
        """Return the allocator's segments.

        Before PyTorch 2.11 a snapshot includes the whole trace, so the SDK takes none while a trace
        is recorded. A preflight accepts that cost.
        """
        segments = self._backend.memory_snapshot()
        if segments is None and self._has_trace:
            segments = (self._backend.full_snapshot(traces=True) or {}).get("segments")
        return segments or []

    def _write_progress(self) -> None:
        """Append a line for the parent: step, and highest allocated and reserved bytes so far."""
        allocated = max((meter.peak_allocated for meter in self._meters.values()), default=0)
        reserved = max((meter.peak_reserved for meter in self._meters.values()), default=0)
        with (self._config.folder / PROGRESS_FILE).open("a") as file:
            file.write(f"{self._counter.count} {allocated} {reserved}\n")

    def _write(self, *, stopped: bool) -> None:
        """Write the trace, and then the report, which includes the RAM that the trace took."""
        self.marks.note_tensors()
        snapshot = self._backend.full_snapshot(traces=True) if self._has_trace else None
        if snapshot is not None:
            write_trace(self._config.folder, snapshot)
        uncaught = getattr(sys, "last_value", None)
        ran_out = not stopped and self._ooms() > self._ooms_at_step
        known = (self._memory(meter) for meter in self._meters.values())
        devices = (device and self._with_uses(device, snapshot) for device in known)
        report = ProcessReport(
            stopped=stopped,
            steps=self._counter.count,
            calls=self._calls,
            out_of_memory=is_out_of_memory(uncaught) or ran_out,
            message=None if uncaught is None else str(uncaught),
            devices=tuple(device for device in devices if device),
            host_bytes=peak_host_bytes(),
            values_read=values_read(),
            torch_version=self._backend.versions().get("torch", ""),
        )
        write_report(self._config.folder, report)

    def _memory(self, meter: DeviceMeter) -> GpuMemory | None:
        stats = self._backend.window_stats(meter.device)
        totals = {device.index: device.total_bytes for device in self._backend.devices()}
        total, free = totals.get(meter.device), self._backend.free_bytes(meter.device)
        if not stats or total is None or free is None:
            return None
        outside = total - free - int(stats["reserved_bytes"]["all"]["current"])
        return replace(
            meter.memory(stats, total, outside), communicators=self._communicators(meter.device)
        )

    def _communicators(self, device: int) -> tuple[tuple[str, int], ...]:
        """Return what NCCL counts, by process group; nothing before PyTorch 2.12."""
        found = []
        for group in self._backend.process_groups():
            memory = group.memory() if group.is_ready and group.device == device else None
            if memory is not None:
                found.append((group.name, memory.persistent + memory.suspendable))
        return tuple(found)

    def _with_uses(self, device: GpuMemory, snapshot: Mapping[str, Any] | None) -> GpuMemory:
        """Return the figures with what was allocated at the peak, if this process has the trace."""
        if snapshot is None or not self._has_own_trace:
            return device
        peak = self.marks.peak(snapshot, device.device, SourceLines(repository(Path.cwd())))
        uses = with_rounding(peak.uses, device.peak_allocated) if peak else ()
        return replace(device, uses=uses)

    def _ooms(self) -> int:
        all_stats = (self._backend.window_stats(index) for index in self._meters)
        return sum(int(stats["num_ooms"]) for stats in all_stats if stats)
