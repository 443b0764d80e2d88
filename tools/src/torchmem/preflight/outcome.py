"""What one run on a phantom card showed. Plain values; all sizes are bytes.

How far a run is, told after every step.

Reads what the script's processes left in the scratch folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torchmem.preflight.plan import OOM_SUFFIX, PROGRESS_FILE, REPORT_SUFFIX, SNAPSHOT_SUFFIX

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


@dataclass(frozen=True, slots=True)
class Progress:
    """The state after optimizer step `step` of `steps_wanted`: bytes of the fullest card, the most so far."""

    step: int
    steps_wanted: int
    peak_allocated: int
    peak_reserved: int


LACKING_FILE = Path("cards", "lacking")
NOT_SUPPORTED = re.compile("not.?supported", re.IGNORECASE)
"""In the words that PyTorch has for the error codes of every CUDA library."""


def read_outcome(folder: Path, exit_code: int, seconds: float) -> Outcome:
    """The outcome of the process that stepped most, and among those of the one that reserved most."""
    lacking = _lacking(folder / LACKING_FILE)
    found = [
        (path, _outcome(json.loads(path.read_text()), exit_code, seconds))
        for path in _reports(folder)
    ]
    if not found:
        ended: Ended = (
            "unsupported" if lacking and exit_code else "error" if exit_code else "finished"
        )
        return Outcome(
            ended, exit_code, _steps(folder / PROGRESS_FILE), seconds, 0, lacking=lacking
        )
    path, outcome = max(found, key=lambda pair: (pair[1].steps, _reserved(pair[1])))
    name = path.name.removesuffix(REPORT_SUFFIX)
    unsupported = (
        outcome.ended == "error" and lacking and NOT_SUPPORTED.search(outcome.error_message or "")
    )
    return replace(
        outcome,
        ended="unsupported" if unsupported else outcome.ended,
        lacking=lacking,
        snapshot=_existing(path.with_name(name + SNAPSHOT_SUFFIX)),
        oom_report=_existing(path.with_name(name + OOM_SUFFIX)),
    )


def _steps(path: Path) -> int:
    """How far a script got that was killed before it could say more."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((int(line.split()[0]) for line in lines), default=0)


def _reports(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{REPORT_SUFFIX}"))


def _outcome(report: Mapping[str, Any], exit_code: int, seconds: float) -> Outcome:
    return Outcome(
        ended=_ended(report, exit_code),
        exit_code=exit_code,
        steps=report["steps"],
        seconds=seconds,
        host_bytes=report["host_bytes"],
        devices=tuple(_device(fields) for fields in report["devices"]),
        error_message=report["message"],
        values_read=report["values_read"],
    )


def _ended(report: Mapping[str, Any], exit_code: int) -> Ended:
    if report["stopped"]:
        return "steps"
    if exit_code == 0:
        return "finished"
    return "oom" if report["out_of_memory"] else "error"


def _device(fields: Mapping[str, Any]) -> DeviceMemory:
    steps = tuple(StepMemory(**step) for step in fields["steps"])
    phases = tuple((phase, peak) for phase, peak in fields["phase_peaks"])
    return DeviceMemory(**{**fields, "steps": steps, "phase_peaks": phases})


def _lacking(path: Path) -> tuple[str, ...]:
    """Names in the order of their first call."""
    return tuple(dict.fromkeys(path.read_text().split())) if path.exists() else ()


def _reserved(outcome: Outcome) -> int:
    return max((device.peak_reserved for device in outcome.devices), default=0)


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None
