"""Peaks within a window, such as a step or a phase, and the user's own peaks kept right while we reset PyTorch's.

Phases that the script names: the highest allocated bytes within each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from torchmem.sdk._cost import CpuMeter
from torchmem.sdk._errors import Errors
from torchmem.sdk._recorder import Recorder


class WindowPeak:
    """Highest value of one statistic since the window began.

    Exact when PyTorch's own peak moved meanwhile: it rose, so the new peak lies in the window, or it fell, so the user
    reset it in the window. Otherwise the peak was not reached again, and the highest value seen is a lower bound.
    """

    def __init__(self, current: int, peak: int) -> None:
        self.highest = current
        self._peak = peak

    def update(self, current: int, peak: int) -> None:
        """Take the statistic's current value and PyTorch's peak of it."""
        self.highest = max(self.highest, current if peak == self._peak else peak)
        self._peak = peak

    def rebase(self, peak: int) -> None:
        """PyTorch's peak was set to `peak` by ourselves; what follows is compared with that."""
        self._peak = peak


class MemoryModule(Protocol):
    """What is used of `torch.cuda.memory` (PyTorch 2.13); its other functions read peaks through the first of these."""

    memory_stats_as_nested_dict: Callable[..., dict[str, Any]]
    reset_peak_memory_stats: Callable[..., None]


class UserPeaks:
    """Lets us reset PyTorch's peaks without the user noticing: `torch.cuda.max_memory_*` go on from before.

    Replaces two functions in each of `modules` (torch.cuda.memory and torch.cuda). `device_index` resolves what users
    pass as a device. `torch.accelerator` reads past these functions and sees the peaks since our reset.
    """

    def __init__(
        self, modules: tuple[MemoryModule, ...], device_index: Callable[[Any], int]
    ) -> None:
        self._stats = modules[0].memory_stats_as_nested_dict
        self._reset = modules[0].reset_peak_memory_stats
        self._device_index = device_index
        self._before: dict[int, dict[tuple[str, str], int]] = {}
        for module in modules:
            module.memory_stats_as_nested_dict = self._stats_for_user
            module.reset_peak_memory_stats = self._reset_by_user

    def stats(self, device: int) -> dict[str, Any]:
        """PyTorch's own statistics, with the peaks since our last reset."""
        return self._stats(device)

    def reset(self, device: int) -> None:
        """Reset PyTorch's peaks, remembering them for the user."""
        before = self._before.setdefault(device, {})
        for key, values in _with_peaks(self._stats(device)):
            before[key] = max(before.get(key, 0), values["peak"])
        self._reset(device)

    def _stats_for_user(self, device: Any = None) -> dict[str, Any]:
        stats = self._stats(device)
        before = self._before.get(self._device_index(device), {}) if self._before else {}
        for key, values in _with_peaks(stats) if before else ():
            values["peak"] = max(values["peak"], before.get(key, 0))
        return stats

    def _reset_by_user(self, device: Any = None) -> None:
        if self._before:
            self._before.pop(self._device_index(device), None)
        self._reset(device)


def _with_peaks(stats: dict[str, Any]) -> list[tuple[tuple[str, str], dict[str, int]]]:
    """The innermost dicts of the nested statistics that hold a peak, by statistic and pool."""
    nested = [(name, value) for name, value in stats.items() if isinstance(value, dict)]
    plain = [((name, ""), value) for name, value in nested if "peak" in value]
    pooled = [
        ((name, pool), v)
        for name, value in nested
        for pool, v in value.items()
        if isinstance(v, dict) and "peak" in v
    ]
    return plain + pooled


MOST_PHASES = 32


class Phases:
    """Opens and closes phases; each name is measured at most once in `interval` seconds, as steps are."""

    def __init__(
        self,
        recorder: Recorder,
        errors: Errors,
        meter: CpuMeter,
        interval: float,
        *,
        reset_peaks: bool,
    ) -> None:
        self.recorder = recorder
        self.errors = errors
        self.meter = meter
        self._interval = interval
        self._resets = reset_peaks
        self._due: dict[str, float] = {}
        self._open: list[dict[int, WindowPeak]] = []

    def begin(self, name: str) -> dict[int, WindowPeak] | None:
        """The windows, by device, of a phase that is to be measured; None when it is too early or nothing is known."""
        now = time.perf_counter()
        is_early = now < self._due.get(name, 0.0) or (
            name not in self._due and len(self._due) >= MOST_PHASES
        )
        if is_early or not self.recorder.backend.is_initialized():
            return None
        if self._resets:
            self.reset()
        windows = {
            device: WindowPeak(*values) for device, values in self.recorder.allocated().items()
        }
        if not windows:
            return None
        self._due[name] = now + self._interval
        self._open.append(windows)
        return windows

    def end(self, name: str, windows: dict[int, WindowPeak]) -> None:
        """The phase is over: remember the highest value of each device."""
        self._open = [others for others in self._open if others is not windows]
        for device, values in self.recorder.allocated().items():
            if device in windows:
                windows[device].update(*values)
                self.recorder.record_phase(device, name, windows[device].highest)

    def reset(self) -> None:
        """Reset PyTorch's peaks; phases that are open around this one keep what they have seen."""
        before = self.recorder.allocated()
        for windows in self._open:
            for device, window in windows.items():
                window.update(*before.get(device, (0, 0)))
                window.rebase(before.get(device, (0, 0))[0])
        self.recorder.reset_peaks()


class Phase:
    """One `with session.phase(name):`; the script's exceptions pass through, ours do not exist."""

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases = phases
        self._name = name
        self._windows: dict[int, WindowPeak] | None = None

    def __enter__(self) -> None:
        started = time.thread_time()
        with self._phases.errors.swallow("phase"):
            self._windows = self._phases.begin(self._name)
        self._phases.meter.add(time.thread_time() - started)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        started = time.thread_time()
        with self._phases.errors.swallow("phase"):
            if self._windows is not None:
                self._phases.end(self._name, self._windows)
        self._phases.meter.add(time.thread_time() - started)
