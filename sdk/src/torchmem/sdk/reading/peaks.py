"""Peaks of allocated bytes within a window, such as a phase that the script names."""

from __future__ import annotations

import time
from types import TracebackType

from torchmem.sdk.draft import Draft
from torchmem.sdk.part import Part
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.cost import CpuMeter
from torchmem.sdk.safety.errors import Errors, Stage
from torchmem.sdk.safety.interruptions import shield

MAX_PHASES = 32


class WindowPeak:
    """The highest value of one statistic since the window began.

    Exact if PyTorch's own peak moved in the window: if it rose, the new peak lies in the window; if
    it fell, the user reset it in the window. Otherwise the old peak was not reached again, and the
    highest value seen is a lower bound.
    """

    def __init__(self, current: int, peak: int) -> None:
        self.highest = current
        self._peak = peak

    def update(self, current: int, peak: int) -> None:
        """Take the statistic's current value and PyTorch's peak of it."""
        self.highest = max(self.highest, current if peak == self._peak else peak)
        self._peak = peak

    def rebase(self, peak: int) -> None:
        """Compare later peaks with `peak`, to which the SDK itself has reset PyTorch's."""
        self._peak = peak


class Phases(Part):
    """Begins and ends phases; measures each name at most once in `interval` seconds."""

    stage: Stage = "phase"

    def __init__(
        self,
        recorder: Recorder,
        errors: Errors,
        meter: CpuMeter,
        interval: float,
        *,
        reset_peaks: bool,
    ) -> None:
        self.errors = errors
        self.meter = meter
        self._recorder = recorder
        self._interval = interval
        self._resets = reset_peaks
        self._due: dict[str, float] = {}
        self._open: list[dict[int, WindowPeak]] = []
        self._entered: list[Phase] = []
        self._peaks: dict[int, dict[str, int]] = {}

    @property
    def current(self) -> str | None:
        """Name of the phase that was entered last and is not left yet, measured or not."""
        phase = next(iter(self._entered[-1:]), None)
        return None if phase is None else phase.name

    def enter(self, phase: Phase) -> None:
        """Note that a phase was entered."""
        self._entered.append(phase)

    def leave(self, phase: Phase) -> None:
        """Note that a phase was left."""
        self._entered = [other for other in self._entered if other is not phase]

    def open(self, name: str) -> dict[int, WindowPeak] | None:
        """Return the phase's windows by device, or None if the phase is not measured now."""
        now = time.perf_counter()
        if not self._is_due(name, now) or not self._recorder.backend.is_initialized():
            return None
        if self._resets:
            self.reset()
        windows = {
            device: WindowPeak(*values) for device, values in self._recorder.allocated().items()
        }
        if not windows:
            return None
        self._due[name] = now + self._interval
        self._open.append(windows)
        return windows

    def _is_due(self, name: str, now: float) -> bool:
        if name in self._due:
            return now >= self._due[name]
        return len(self._due) < MAX_PHASES

    def shut(self, name: str, windows: dict[int, WindowPeak]) -> None:
        """Close the phase's windows and record the highest value of each device."""
        self._open = [others for others in self._open if others is not windows]
        for device, values in self._recorder.allocated().items():
            if device in windows:
                windows[device].update(*values)
                peaks = self._peaks.setdefault(device, {})
                peaks[name] = max(peaks.get(name, 0), windows[device].highest)

    def is_new(self, device: int, name: str | None) -> bool:
        """Return whether no phase of this name was measured on the device."""
        return name not in self._peaks.get(device, {})

    def complete(self, sample: Draft) -> None:
        """Add the peaks of all phases."""
        for device in sample.devices:
            if device.index in self._peaks:
                device.add(phase_peaks=dict(self._peaks[device.index]))

    def reset(self) -> None:
        """Reset PyTorch's peaks; the phases that are open keep what they have seen."""
        before = self._recorder.allocated()
        for windows in self._open:
            for device, window in windows.items():
                window.update(*before.get(device, (0, 0)))
                window.rebase(before.get(device, (0, 0))[0])
        self._recorder.reset_peaks()


class Phase:
    """One `with session.phase(name):`. Lets the script's exceptions pass and raises none."""

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases = phases
        self.name = name
        self._windows: dict[int, WindowPeak] | None = None

    @shield
    def __enter__(self) -> None:
        started = time.thread_time()
        with self._phases.errors.suppress("phase"):
            self._phases.enter(self)
            self._windows = self._phases.open(self.name)
        self._phases.meter.add(time.thread_time() - started)

    @shield
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        started = time.thread_time()
        with self._phases.errors.suppress("phase"):
            self._phases.leave(self)
            if self._windows is not None:
                self._phases.shut(self.name, self._windows)
        self._phases.meter.add(time.thread_time() - started)
