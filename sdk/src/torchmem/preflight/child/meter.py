"""What one card's memory does from phase to phase and from step to step. All sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchmem.core.snapshot import NestedStats
from torchmem.preflight.outcome import DeviceMemory, Phase, StepMemory


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
        before = self.steps.pop() if self.steps and self.steps[-1].step == step else StepMemory(step, 0, 0, 0)
        peak_allocated = max(before.peak_allocated, self._step_allocated)
        self.steps.append(StepMemory(step, peak_allocated, max(before.peak_reserved, self._step_reserved), allocated))
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
