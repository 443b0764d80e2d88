"""Phases that the script names: the highest allocated bytes within each."""

from __future__ import annotations

import time
from types import TracebackType

from torchmem.sdk._cost import CpuMeter
from torchmem.sdk._errors import Errors
from torchmem.sdk._peaks import WindowPeak
from torchmem.sdk._recorder import Recorder

MOST_PHASES = 32


class Phases:
    """Opens and closes phases; each name is measured at most once in `interval` seconds, as steps are."""

    def __init__(
        self, recorder: Recorder, errors: Errors, meter: CpuMeter, interval: float, *, reset_peaks: bool
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
        is_early = now < self._due.get(name, 0.0) or (name not in self._due and len(self._due) >= MOST_PHASES)
        if is_early or not self.recorder.backend.is_initialized():
            return None
        if self._resets:
            self.reset()
        windows = {device: WindowPeak(*values) for device, values in self.recorder.allocated().items()}
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        started = time.thread_time()
        with self._phases.errors.swallow("phase"):
            if self._windows is not None:
                self._phases.end(self._name, self._windows)
        self._phases.meter.add(time.thread_time() - started)
