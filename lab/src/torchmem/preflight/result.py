"""What one run on a phantom GPU showed, read from the files that its processes wrote.

All sizes are bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchmem.allocator.sizes import parse_size
from torchmem.compare.peak_memory import PeakMemory, Use
from torchmem.output.terminal import counted
from torchmem.preflight.plan import OOM_SUFFIX, PROGRESS_FILE, REPORT_SUFFIX, SNAPSHOT_SUFFIX
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import convert

if TYPE_CHECKING:
    from typing_extensions import Self

Ended = Literal["steps", "finished", "oom", "error", "unsupported"]
"""How a run ended.

steps: stopped after the requested steps. finished: exited by itself with code 0. oom: an
OutOfMemoryError. error: another error in the script. unsupported: a call that the phantom
GPU lacks.
"""
Phase = Literal["setup", "forward", "backward", "optimizer"]
"""Setup lasts until the first forward pass. Forward is every part of a step that is neither
backward nor optimizer."""
LACKING_FILE = Path("gpus", "lacking")
ESTIMATED_FILE = Path("gpus", "estimated")
SIGNAL_BASE = 128
"""Shells report a program killed by signal N as exit code 128 + N."""
_NOT_SUPPORTED = re.compile("not.?supported", re.IGNORECASE)
"""Matches PyTorch's messages for the "not supported" codes of all CUDA libraries."""
_REQUEST = re.compile(r"Tried to allocate ([0-9.]+ (?:b|KiB|MiB|GiB))")
"""PyTorch's OutOfMemoryError message; "b" is the start of "bytes"."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """One training step. `peak_*`: highest value within it. allocated: value at its end."""

    step: int
    peak_allocated: int
    peak_reserved: int
    allocated: int


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU as used by the script's process.

    device: PyTorch's device index. total: memory of the GPU. outside: memory taken by the CUDA
    context and by libraries, outside PyTorch's allocator. peak_*: highest value of the allocator's
    statistics over the run. peak_step, peak_phase: where peak_allocated was reached; step 0 is
    setup. stranded: highest value of free bytes that could not be returned to the driver, from
    PyTorch's statistics; with expandable segments, which these exclude, from the ends of the steps
    or an exact replay of the trace. phase_peaks: highest allocated bytes by phase. steps:
    one entry per step; the first is step 1. uses: what was allocated at the peak, which they add up
    to; empty if that is unknown. communicators: what NCCL's communicators take of `outside`, by
    process group, as the phantom GPU estimates it.
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
    uses: tuple[Use, ...] = ()
    communicators: tuple[tuple[str, int], ...] = ()

    @property
    def headroom(self) -> int:
        """Bytes of the GPU left at the peak: total - outside - peak_reserved."""
        return self.total - self.outside - self.peak_reserved

    @property
    def memory(self) -> PeakMemory:
        """The peaks and what was allocated then."""
        return PeakMemory(self.peak_allocated, self.peak_reserved, uses=self.uses)


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended and how much memory it needed.

    steps: number of optimizer steps. calls: if there were none, number of calls of the model, which
    are the steps of `devices`. seconds: wall time. host_bytes: peak RAM of the process.
    devices: GPUs that the script used; empty if it never initialized CUDA. lacking: names of CUDA
    calls that the phantom GPU lacks, in the order of their first use. estimated: libraries whose
    workspaces are estimates. snapshot: file for memory_viz
    and `torchmem whatif` with the trace since CUDA was initialized; None if nothing was recorded.
    oom_report: JSON report of the last OOM, for `torchmem why`. error_message: message of the
    exception that ended the script. values_read: number of times the script read from a GPU, for
    example with `Tensor.item()`. torch_version: of PyTorch, "" if unknown.
    """

    ended: Ended
    exit_code: int
    steps: int
    seconds: float
    host_bytes: int
    devices: tuple[GpuMemory, ...] = ()
    lacking: tuple[str, ...] = ()
    snapshot: Path | None = None
    oom_report: Path | None = None
    error_message: str | None = None
    values_read: int = 0
    calls: int = 0
    estimated: tuple[str, ...] = ()
    torch_version: str = ""

    @property
    def step_name(self) -> Literal["optimizer step", "forward call"]:
        """What a step of this run is."""
        return "forward call" if self.calls and not self.steps else "optimizer step"

    @property
    def fullest_device(self) -> GpuMemory:
        """The GPU with the least headroom. Raises ValueError if the script used none."""
        return min(self.devices, key=lambda device: device.headroom)

    @property
    def versions(self) -> dict[str, str]:
        """The version of PyTorch, if known; the phantom GPU runs builds for CUDA."""
        return {"torch": self.torch_version} if self.torch_version else {}

    @property
    def requested_bytes(self) -> int | None:
        """Size of the failed request in PyTorch's OutOfMemoryError message, or None."""
        match = _REQUEST.search(self.error_message or "")
        return parse_size(match[1]) if match else None

    @property
    def error(self) -> UsageError | None:
        """Why the run allows no verdict; None if it allows one."""
        if self.ended == "error":
            code = self.exit_code if self.exit_code >= 0 else SIGNAL_BASE - self.exit_code
            return UsageError(
                f"the script ended with exit code {code} {_after_steps(self.steps)}, so there is "
                f"no verdict: see its own messages above{_zero_values_hint(self.values_read)}."
            )
        if self.ended == "unsupported":
            names = ", ".join(dict.fromkeys(self.lacking)) or "a CUDA call"
            return UsageError(
                f"the script needs {names}, which the phantom GPU does not support: disable that "
                "part of the script, or use a real GPU."
            )
        return None if self.ended == "oom" else self._nothing_measured()

    def checked(self) -> Self:
        """Return this result. Raises its `error` if it allows no verdict."""
        if self.error is not None:
            raise self.error
        return self

    def _nothing_measured(self) -> UsageError | None:
        if not self.devices:
            return UsageError(
                "the script never used CUDA: make it train on the GPU, for example with --device "
                "cuda."
            )
        if self.steps or self.calls:
            return None
        ooms = sum(device.ooms for device in self.devices)
        caught = f"caught {counted(ooms, 'OutOfMemoryError')} and " if ooms else ""
        return UsageError(
            f"the script {caught}ended without an optimizer step and without a call of a module: "
            "let it train or infer, or call session.step() of torchmem.sdk in its own loop."
        )


@dataclass(frozen=True, slots=True)
class RunProgress:
    """State after step `step` of `total_steps`. Sizes: highest so far on any GPU."""

    step: int
    total_steps: int
    peak_allocated: int
    peak_reserved: int


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """Report of one of the script's processes, written as `PID.report.json` when it ends.

    stopped: ended by the preflight after the requested steps. calls: calls of the model, if the
    script did not train. message: message of an uncaught
    exception. host_bytes: peak RAM. values_read: number of reads from a GPU.
    """

    stopped: bool
    steps: int
    out_of_memory: bool
    message: str | None
    devices: tuple[GpuMemory, ...]
    host_bytes: int
    values_read: int
    calls: int = 0
    torch_version: str = ""

    @property
    def extent(self) -> tuple[int, int, int]:
        """A key that is highest for the process with the most steps, then the most memory."""
        reserved = max((device.peak_reserved for device in self.devices), default=0)
        return self.steps, self.calls, reserved

    @classmethod
    def load(cls, path: Path) -> ProcessReport:
        """Read the file of one process. Raise UsageError if it is damaged."""
        try:
            return convert(json.loads(path.read_bytes()), cls)
        except (ValueError, RecursionError):
            raise UsageError(
                "the report of the script's process is damaged, perhaps because the disk was full: "
                "run the preflight again."
            ) from None


def read_result(folder: Path, exit_code: int, seconds: float) -> RunResult:
    """Return the result of the process with the most steps and then the most reserved memory."""
    lacking = _names(folder / LACKING_FILE)
    paths = sorted(folder.glob(f"*{REPORT_SUFFIX}"))
    if not paths:
        steps = _steps_so_far(folder / PROGRESS_FILE)
        ended = _ended_without_report(exit_code, lacking)
        return RunResult(ended, exit_code, steps, seconds, 0, lacking=lacking)
    reports = [(ProcessReport.load(path), path) for path in paths]
    report, path = max(reports, key=lambda pair: pair[0].extent)
    name = path.name.removesuffix(REPORT_SUFFIX)
    return RunResult(
        ended=_ended(report, exit_code, lacking),
        exit_code=exit_code,
        steps=report.steps,
        seconds=seconds,
        host_bytes=report.host_bytes,
        devices=report.devices,
        lacking=lacking,
        snapshot=_existing(path.with_name(name + SNAPSHOT_SUFFIX)),
        oom_report=_existing(path.with_name(name + OOM_SUFFIX)),
        error_message=report.message,
        values_read=report.values_read,
        calls=report.calls,
        estimated=_names(folder / ESTIMATED_FILE),
        torch_version=report.torch_version,
    )


def _names(path: Path) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path.read_text().split())) if path.exists() else ()


def _steps_so_far(path: Path) -> int:
    """Return the last complete line's step, for a script that was killed before it could report."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((int(line.split()[0]) for line in lines), default=0)


def _ended_without_report(exit_code: int, lacking: Sequence[str]) -> Ended:
    if not exit_code:
        return "finished"
    return "unsupported" if lacking else "error"


def _ended(report: ProcessReport, exit_code: int, lacking: Sequence[str]) -> Ended:
    """Return how the run ended; a shell can hide the exit code of a script that failed."""
    if report.stopped:
        return "steps"
    if report.out_of_memory and (exit_code or report.message is not None):
        return "oom"
    if not exit_code:
        return "finished"
    needs_lacking = lacking and _NOT_SUPPORTED.search(report.message or "")
    return "unsupported" if needs_lacking else "error"


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


def _after_steps(steps: int) -> str:
    return (
        f"after {counted(steps, 'optimizer step')}" if steps else "before its first optimizer step"
    )


def _zero_values_hint(values_read: int) -> str:
    if not values_read:
        return ""
    return (
        f"; it had read {counted(values_read, 'value')} from the phantom GPU, which are zero, so "
        "disable code that needs real values"
    )
