"""What one run on a phantom card showed. Plain values; all sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Ended = Literal["steps", "finished", "oom", "error", "unsupported"]
"""Stopped after the steps asked for; by itself with exit code 0; by an OutOfMemoryError; by another error of its own;
by a call that the phantom GPU lacks."""
Phase = Literal["setup", "forward", "backward", "optimizer"]
"""Setup is everything before the first optimizer step's forward pass ended in a backward; forward is all of a step that
is neither backward nor the optimizer."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """One training step. `peak_*`: the most within it; `allocated`: what was left at its end."""

    step: int
    peak_allocated: int
    peak_reserved: int
    allocated: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What one card saw of the process.

    device: torch's index. total: memory of the card. outside: what the context takes of it. peak_*: the most over the
    run, in the allocator's terms. peak_step, peak_phase: where the most was allocated (step 0 is before the first
    step's end). stranded: free bytes of the default pools that could not go back to the driver, at the end of a step,
    the most of all steps. headroom: total less outside and peak reserved. phase_peaks: most allocated by phase.
    steps: one for each step, the first is 1.
    """

    device: int
    total: int
    outside: int
    peak_allocated: int
    peak_reserved: int
    peak_step: int
    peak_phase: Phase
    stranded: int
    retries: int
    ooms: int
    device_allocs: int
    phase_peaks: tuple[tuple[Phase, int], ...]
    steps: tuple[StepMemory, ...]

    @property
    def headroom(self) -> int:
        """Bytes of the card that were never needed."""
        return self.total - self.outside - self.peak_reserved


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended and what it needed.

    steps: optimizer steps seen. devices: those that the script used; empty when it never started CUDA. lacking: names
    of the calls that the phantom GPU lacks, in the order they were made. snapshot: file for memory_viz and `torchmem
    whatif`, with the trace from the start of CUDA; None when nothing was recorded. oom_report: the JSON report of the
    last OOM, readable with `torchmem oom`. error_message: of the exception that ended the script, PyTorch's own in the
    case of an OOM. seconds: wall time. host_bytes: most RAM of the process. values_read: how often the script read from
    the card (`Tensor.item()` and the like), which gives zeros.
    """

    ended: Ended
    exit_code: int
    steps: int
    seconds: float
    host_bytes: int
    devices: tuple[DeviceMemory, ...] = ()
    lacking: tuple[str, ...] = ()
    snapshot: Path | None = None
    oom_report: Path | None = None
    error_message: str | None = None
    values_read: int = 0
