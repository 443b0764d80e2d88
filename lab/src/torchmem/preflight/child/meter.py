"""The peaks of one GPU, phase by phase and step by step. All sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchmem.allocator.snapshot import NestedStats
from torchmem.preflight.result import GpuMemory, Phase, StepMemory


@dataclass(slots=True)
class DeviceMeter:
    """Peaks of one device, from statistics whose own peaks are reset after each reading."""

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
        """Add the statistics of a phase within step `step`."""
        allocated = int(stats["allocated_bytes"]["all"]["peak"])
        reserved = int(stats["reserved_bytes"]["all"]["peak"])
        self.stranded = max(self.stranded, int(stats["inactive_split_bytes"]["all"]["peak"]))
        if allocated > self.peak_allocated:
            self.peak_allocated, self.peak_step, self.peak_phase = allocated, step, phase
        self.peak_reserved = max(self.peak_reserved, reserved)
        self.phase_peaks[phase] = max(self.phase_peaks.get(phase, 0), allocated)
        self._step_allocated = max(self._step_allocated, allocated)
        self._step_reserved = max(self._step_reserved, reserved)

    def step_ended(self, step: int, allocated: int, stranded: int) -> None:
        """End step `step`, whose last phase was added, with what remains allocated.

        Called again for the same step if another optimizer steps in it.
        """
        peak_allocated, peak_reserved = self._step_allocated, self._step_reserved
        if self.steps and self.steps[-1].step == step:
            earlier = self.steps.pop()
            peak_allocated = max(earlier.peak_allocated, peak_allocated)
            peak_reserved = max(earlier.peak_reserved, peak_reserved)
        self.steps.append(StepMemory(step, peak_allocated, peak_reserved, allocated))
        self._step_allocated = self._step_reserved = 0
        self.stranded = max(self.stranded, stranded)

    def forget_steps(self) -> None:
        """Make the steps so far, which were calls of the model, a part of the first step."""
        for step in self.steps:
            self._step_allocated = max(self._step_allocated, step.peak_allocated)
            self._step_reserved = max(self._step_reserved, step.peak_reserved)
        self.steps.clear()

    def memory(self, stats: NestedStats, total: int, outside: int) -> GpuMemory:
        """Return the peaks, with the counters of the newest statistics."""
        return GpuMemory(
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
