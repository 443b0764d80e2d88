"""The figures of a GPU in a preflight, by what its steps keep and need."""

from __future__ import annotations

from collections.abc import Sequence

from torchmem.preflight.result import GpuMemory, StepMemory


def gpu_of_steps(
    kept: Sequence[int], needed: Sequence[int], total: int, outside: int = 0
) -> GpuMemory:
    """Return a GPU whose steps end with `kept` bytes and need `needed` more in between."""
    peaks = [end + size for end, size in zip(kept, needed, strict=True)]
    rows = zip(peaks, kept, strict=True)
    return GpuMemory(
        device=0,
        total=total,
        outside=outside,
        peak_allocated=max(peaks),
        peak_reserved=max(peaks),
        peak_step=1,
        peak_phase="backward",
        stranded=0,
        retries=0,
        ooms=0,
        device_allocs=9,
        phase_peaks=(),
        steps=tuple(StepMemory(step, peak, peak, end) for step, (peak, end) in enumerate(rows, 1)),
    )
