"""Measures tests in this process: on its GPU, or on the phantom GPU that it runs on.

Importing this module imports no torch; torch is hooked when the test imports it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmem.compare.peak_memory import PeakMemory
from torchmem.phantom.build import LIBRARY
from torchmem.phantom.gpus import CATALOG
from torchmem.preflight.child.exit import values_read
from torchmem.preflight.child.marks import TraceMarks
from torchmem.preflight.child.phases import PhaseTracker
from torchmem.preflight.child.uses import SourceLines, with_rounding
from torchmem.pytest_plugin.measured import Conditions, MeasuredTest
from torchmem.startup.torch_import import after_torch_import

if TYPE_CHECKING:
    from torchmem.preflight.child.torch_hooks import WatchedBackend
    from torchmem.preflight.result import Phase

MAX_TRACE_EVENTS = 2_000_000
_STARTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"})
"""Audit events of a process that is started."""


class PeakWindow:
    """The highest statistics of each device while it is open, from peaks that are reset."""

    def __init__(self) -> None:
        self.allocated: dict[int, int] = {}
        self.reserved: dict[int, int] = {}

    def add(self, device: int, stats: Mapping[str, Any]) -> None:
        """Add the peaks since the last reset."""
        for known, name in ((self.allocated, "allocated"), (self.reserved, "reserved")):
            peak = int(stats[f"{name}_bytes"]["all"]["peak"])
            known[device] = max(known.get(device, 0), peak)


class MemoryMeasurement:
    """One test, from its setup on. Calls are ignored until the test has imported torch."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._torch: _Torch | None = None
        self._before: dict[int, int] = {}
        self._windows = [PeakWindow()]
        self._has_ended = False
        self._processes = _processes()[0]

    def begin(self) -> None:
        """Begin as soon as torch is imported and CUDA is initialized."""
        after_torch_import(self._torch_imported)

    def allocated(self) -> dict[int, int]:
        """Return the bytes that are allocated now, by device, after collecting garbage."""
        gc.collect()
        if self._torch is None or not self._torch.backend.is_initialized():
            return {}
        self._torch.clear_workspaces()
        return self._torch.allocated()

    def positions(self) -> Mapping[int, int]:
        """Return each device's position in the trace."""
        return self._torch.marks.positions() if self._torch else {}

    def open_window(self) -> tuple[PeakWindow, Mapping[int, int]]:
        """Begin another window within the test; return it and its position in the trace."""
        self._fold()
        self._windows.append(PeakWindow())
        return self._windows[-1], self.positions()

    def close_window(
        self, window: PeakWindow, since: Mapping[int, int], before: Mapping[int, int]
    ) -> MeasuredTest:
        """Return what was used in a window. before: the bytes allocated at its beginning."""
        devices = self._peaks(window, since)
        self._windows.remove(window)
        return self._measured(devices, before)

    def end(
        self, before: Mapping[int, int], since: Mapping[int, int], leak: int | None
    ) -> MeasuredTest:
        """Return what the test has used.

        before, since: the bytes and the positions when it was called. leak: what may be left; if
        there is more, what it is is added.
        """
        self._has_ended = True
        devices = self._peaks(self._windows[0], {})
        measured = self._measured(devices, before)
        if leak is not None and any(
            (each.leaked or 0) > leak for each in measured.devices.values()
        ):
            measured = replace(measured, left=self._left(measured.devices, since))
        if self._torch is not None:
            self._torch.end()
        return measured

    def _torch_imported(self) -> None:
        if not self._has_ended:
            self._torch = _torch()
            self._torch.begin(self)

    def cuda_initialized(self, allocated: Mapping[int, int]) -> None:
        """Note what was allocated before, which is no use of the test."""
        self._before = dict(allocated)

    def _fold(self) -> None:
        """Add the current peaks to all open windows, and reset them."""
        if self._torch is None:
            return
        for device, stats in self._torch.stats().items():
            for window in self._windows:
                window.add(device, stats)
            self._torch.backend.reset_peaks(device)

    def _peaks(self, window: PeakWindow, since: Mapping[int, int]) -> dict[int, PeakMemory]:
        """Return the peaks of a window less what was allocated before the test."""
        self._fold()
        if self._torch is None or not window.allocated:
            return {}
        devices = {
            device: PeakMemory(max(0, peak - self._before.get(device, 0)), window.reserved[device])
            for device, peak in window.allocated.items()
        }
        return self._torch.with_uses(devices, self._root, since)

    def _measured(
        self, devices: Mapping[int, PeakMemory], before: Mapping[int, int]
    ) -> MeasuredTest:
        now = self.allocated()
        leaked = {
            device: replace(memory, leaked=max(0, now.get(device, 0) - before.get(device, 0)))
            for device, memory in devices.items()
        }
        return MeasuredTest(self._conditions(), leaked)

    def _left(
        self, devices: Mapping[int, PeakMemory], since: Mapping[int, int]
    ) -> dict[int, PeakMemory]:
        if self._torch is None:
            return {}
        return self._torch.left(
            {device: each.leaked or 0 for device, each in devices.items()}, self._root, since
        )

    def _conditions(self) -> Conditions:
        started = _processes()[0] - self._processes
        if self._torch is None:
            return Conditions("", "", is_on_phantom(), processes=started)
        return replace(self._torch.conditions(), processes=started)


class _Torch:
    """PyTorch's hooks, which are installed once and call the current measurement."""

    def __init__(self) -> None:
        from torchmem.preflight.child import torch_hooks

        self.backend: WatchedBackend = torch_hooks.WatchedBackend()
        self.clear_workspaces = torch_hooks.clear_cublas_workspaces
        self._gpu_name = torch_hooks.gpu_name
        self._on_forward = torch_hooks.on_forward
        self._current: MemoryMeasurement | None = None
        self._new_marks()
        self.backend.on_step(self._optimizer_stepped)
        torch_hooks.on_optimizer(self._optimizer_begins)
        torch_hooks.around_backward(self._backward_begins, self._backward_ended)
        if is_on_phantom():
            torch_hooks.pass_distribution_checks()

    def begin(self, measurement: MemoryMeasurement) -> None:
        """Measure another test."""
        self._current = measurement
        self._new_marks()
        self._on_forward(self._phases.forward, lambda: False)
        self.backend.on_init(lambda: self._cuda_initialized(measurement))

    def end(self) -> None:
        """Stop recording."""
        self._current = None
        if self.backend.is_initialized():
            self.backend.stop_history()

    def stats(self) -> dict[int, Mapping[str, Any]]:
        """Return the statistics of each device with a context."""
        if not self.backend.is_initialized():
            return {}
        read = {
            each.index: self.backend.window_stats(each.index) for each in self.backend.devices()
        }
        return {device: stats for device, stats in read.items() if stats}

    def allocated(self) -> dict[int, int]:
        """Return the bytes that are allocated now, by device."""
        stats = self.stats()
        return {
            device: int(each["allocated_bytes"]["all"]["current"]) for device, each in stats.items()
        }

    def with_uses(
        self, devices: Mapping[int, PeakMemory], root: Path, since: Mapping[int, int]
    ) -> dict[int, PeakMemory]:
        """Return the peaks with what was allocated at each peak, if it is recorded."""
        snapshot = self._snapshot()
        if snapshot is None:
            return dict(devices)
        lines, found = SourceLines(root), {}
        for device, memory in devices.items():
            peak = self.marks.peak(snapshot, device, lines, since.get(device, 0))
            # The test may have reset PyTorch's own peak.
            allocated = max(memory.peak_allocated or 0, peak.rounded if peak else 0)
            uses = with_rounding(peak.uses, allocated) if peak else ()
            found[device] = replace(memory, peak_allocated=allocated, uses=uses)
        return found

    def left(
        self, leaked: Mapping[int, int], root: Path, since: Mapping[int, int]
    ) -> dict[int, PeakMemory]:
        """Return what was allocated since each position and is still in use."""
        snapshot = self._snapshot()
        if snapshot is None:
            return {}
        lines = SourceLines(root)
        return {
            device: PeakMemory(
                size, uses=self.marks.left(snapshot, device, lines, since.get(device, 0))
            )
            for device, size in leaked.items()
        }

    def _snapshot(self) -> Mapping[str, Any] | None:
        """Return the snapshot with the trace, if this is what records it."""
        self.marks.note_tensors()
        return self.backend.full_snapshot(traces=True) if self.backend.owns_history() else None

    def conditions(self) -> Conditions:
        """Return where the test ran."""
        is_phantom = is_on_phantom()
        read = values_read() if is_phantom else 0
        version = self.backend.versions().get("torch", "")
        return Conditions(self._gpu_model(), version, is_phantom, values_read=read)

    def _gpu_model(self) -> str:
        """Return the catalog's name of the GPU, or else its product name."""
        if is_on_phantom():
            return os.environ.get("PHANTOM_GPU_MODEL", "")
        if not self.backend.is_initialized():
            return ""
        product = self._gpu_name(0)
        return next((model.name for model in CATALOG if model.product == product), product)

    def _new_marks(self) -> None:
        self.marks = TraceMarks(self.backend, self.clear_workspaces)
        self._phases = PhaseTracker(self._phase_ended)

    def _cuda_initialized(self, measurement: MemoryMeasurement) -> None:
        if measurement is self._current:
            self.backend.start_history(MAX_TRACE_EVENTS)
            self.marks.began()
            measurement.cuda_initialized(self.allocated())
            for device in self.stats():
                self.backend.reset_peaks(device)

    def _phase_ended(self, _: Phase) -> None:
        if self._current is not None:
            self.marks.phase_begins(self._phases.phase)

    # Each test has phases of its own, so these are no methods of one tracker.
    def _backward_begins(self) -> None:
        self._phases.backward_begins()

    def _optimizer_begins(self, has_closure: bool) -> None:
        self._phases.optimizer(has_closure)

    def _backward_ended(self) -> None:
        self._phases.backward_ends()
        if self._current is not None and not self._phases.in_backward:
            self.marks.backward_ended()

    def _optimizer_stepped(self, optimizer: Any) -> None:
        if self._current is not None:
            self.marks.optimizer_stepped(optimizer)
            if not self._phases.in_backward:
                self._phases.forward()
                self.marks.step_ended()


@cache
def _torch() -> _Torch:
    return _Torch()


def is_on_phantom() -> bool:
    """Return whether this process runs on a phantom GPU."""
    return LIBRARY in os.environ.get("LD_PRELOAD", "")


@cache
def _processes() -> list[int]:
    """Return a list with the number of processes that this process has started since."""
    count = [0]

    def count_starts(event: str, _: object) -> None:
        if event in _STARTS:
            count[0] += 1

    # Only once, as an audit hook cannot be removed (PEP 578).
    sys.addaudithook(count_starts)
    return count
