"""Other allocator settings and other GPUs: replayed from a run's trace if that is exact, else run.

A replay is exact if it places every allocation at its recorded address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmem.phantom.gpus import CATALOG, GpuModel
from torchmem.preflight.options import PreflightOptions
from torchmem.preflight.result import RunResult
from torchmem.preflight.runner import Runner
from torchmem.sample.errors import UsageError
from torchmem.trace import read
from torchmem.trace.recording import Recording
from torchmem.whatif import result as replay
from torchmem.whatif.engine import SimulatedGpuMemory, line_to_type, on_gpus, what_if
from torchmem.whatif.page import Progress
from torchmem.whatif.recommendation import decide
from torchmem.whatif.settings import (
    COMBINED_DIVISIONS,
    Candidate,
    candidates,
    recorded_settings,
)

Method = Literal["replayed", "rerun"]
MAX_NEARBY_GPU_MODELS = 3
"""GPUs to compare in each direction, smaller and larger."""
MIN_MEMORY_RATIO = 1.1
"""Neighboring GPUs of a comparison differ in memory by at least this factor."""


@dataclass(frozen=True, slots=True)
class GpuModelRow:
    """The run on one GPU. outside: bytes of the GPU that PyTorch cannot use."""

    gpu: GpuModel
    result: replay.ReplayResult
    outside: int

    @property
    def headroom(self) -> int:
        """Bytes of the GPU left at the peak."""
        return self.gpu.memory_bytes - self.outside - self.result.peak_reserved


@dataclass(frozen=True, slots=True)
class PreflightComparison:
    """settings: each setting on the requested GPU. GPUs: the run's settings on each GPU."""

    method: Method
    settings: replay.WhatIf
    gpus: tuple[GpuModelRow, ...]


def compare(
    options: PreflightOptions,
    requested: RunResult,
    traced: RunResult,
    traced_on: GpuModel,
    runner: Runner,
) -> PreflightComparison:
    """Compare settings and GPUs.

    requested: the run on the requested GPU. traced, traced_on: the run whose trace is replayed and
    its GPU; differs from `requested` only if that run ran out of memory.

    Raises:
        UsageError: the trace cannot be replayed.
    """
    recording, device, gpu = _recording(traced), traced.fullest_device, options.plan.gpu
    gpus = options.gpu_models or nearby_gpu_models(gpu)
    with Progress("replaying settings") as progress:
        replayed = what_if(
            recording,
            gpu_bytes=gpu.memory_bytes - device.outside,
            total_bytes=gpu.memory_bytes,
            settings=options.settings or None,
            versions=traced.versions,
            progress=progress,
        )
    if replayed.fidelity.trusted and replayed.fidelity.share == 1:
        memory = traced_on.memory_bytes
        own = SimulatedGpuMemory(traced_on.name, memory - device.outside, memory)
        libraries = device.outside - traced_on.context_bytes
        rows = _replayed_gpus(recording, own, gpus, libraries, replayed)
        return PreflightComparison("replayed", replayed, rows)
    settings = _rerun_settings(options, recording, requested, runner, replayed.fidelity)
    return PreflightComparison("rerun", settings, _rerun_gpus(options, gpus, runner))


def nearby_gpu_models(gpu: GpuModel) -> list[GpuModel]:
    """Return the GPU with its next smaller and larger neighbor in the catalog, ascending."""
    ascending = sorted(CATALOG, key=lambda each: each.memory_bytes)
    gpus = [gpu]
    for each in reversed(ascending):
        smallest = gpus[0].memory_bytes
        if len(gpus) <= MAX_NEARBY_GPU_MODELS and MIN_MEMORY_RATIO * each.memory_bytes <= smallest:
            gpus.insert(0, each)
    limit = len(gpus) + MAX_NEARBY_GPU_MODELS
    for each in ascending:
        largest = gpus[-1].memory_bytes
        if len(gpus) < limit and each.memory_bytes >= MIN_MEMORY_RATIO * largest:
            gpus.append(each)
    return gpus


def _recording(result: RunResult) -> Recording:
    if result.snapshot is None:
        raise UsageError("no trace was recorded, as with an allocator other than PyTorch's own.")
    device = result.fullest_device.device
    for recording in read(result.snapshot):
        if recording.device == device:
            return recording
    raise UsageError(f"the trace has no events on cuda:{device}.")


def _replayed_gpus(
    recording: Recording,
    own: SimulatedGpuMemory,
    gpus: Sequence[GpuModel],
    libraries: int,
    replayed: replay.WhatIf,
) -> tuple[GpuModelRow, ...]:
    """libraries: bytes outside PyTorch besides the CUDA context, assumed equal on each GPU."""
    outside = [gpu.context_bytes + libraries for gpu in gpus]
    memories = [
        SimulatedGpuMemory(gpu.name, max(1, gpu.memory_bytes - used), gpu.memory_bytes)
        for gpu, used in zip(gpus, outside, strict=True)
    ]
    with Progress("replaying GPUs") as progress:
        results = on_gpus(recording, own, memories, replayed, progress)
    return tuple(GpuModelRow(*row) for row in zip(gpus, results, outside, strict=True))


def _rerun_gpus(
    options: PreflightOptions, gpus: Sequence[GpuModel], runner: Runner
) -> tuple[GpuModelRow, ...]:
    """Run the script once per GPU. Raises the error of a run that has no verdict."""
    rows = []
    for gpu in gpus:
        plan = replace(options.plan, gpu=gpu)
        result = runner.run_captured(plan, f"phantom {gpu.name}").checked()
        outside = result.fullest_device.outside if result.devices else gpu.context_bytes
        rows.append(GpuModelRow(gpu, _as_replay(gpu.name, "", result), outside))
    return tuple(rows)


def _rerun_settings(
    options: PreflightOptions,
    recording: Recording,
    requested: RunResult,
    runner: Runner,
    fidelity: replay.Fidelity,
) -> replay.WhatIf:
    """Return what `what_if` would, from one run per setting. Its events are steps."""
    recorded = recorded_settings(recording)
    baseline = _as_replay("recorded", recorded.conf, requested)
    given, divisions = options.settings or None, COMBINED_DIVISIONS
    tried = candidates(recording, recorded, given, gpu_known=True, divisions=divisions)
    others = [_rerun_setting(options, each, runner) for each in tried]
    verdict = decide(replace(fidelity, reason=None), baseline, others)
    best = next((other for other in others if other.name == verdict.recommended), None)
    line = None if best is None else line_to_type(recording, best.conf, requested.versions)
    device = requested.fullest_device
    return replay.WhatIf(
        recording.name,
        recording.device,
        options.plan.steps,
        device.total - device.outside,
        "given",
        fidelity,
        (baseline, *others),
        replace(verdict, line=line, reasons=()),
    )


def _rerun_setting(
    options: PreflightOptions, setting: Candidate, runner: Runner
) -> replay.ReplayResult:
    if setting.refused is not None:
        return replay.ReplayResult(setting.name, setting.conf, setting.refused)
    plan = replace(options.plan, alloc_conf=setting.conf)
    result = runner.run_captured(plan, f"phantom, {setting.name}")
    if result.error is not None:
        refused = f"With this setting: {result.error}"
        return replay.ReplayResult(setting.name, setting.conf, refused)
    return _as_replay(setting.name, setting.conf, result)


def _as_replay(name: str, conf: str, result: RunResult) -> replay.ReplayResult:
    """Return a run as the result of a replay. Its events are steps."""
    if not result.devices:
        return replay.ReplayResult(name, conf, refused="It ended before the script used the GPU.")
    device = result.fullest_device
    return replay.ReplayResult(
        name,
        conf,
        start="empty",
        peak_reserved=device.peak_reserved,
        peak_allocated=device.peak_allocated,
        worst_stranded=device.stranded,
        retries=device.retries,
        ooms=device.ooms,
        oom=_failed_request(result) if result.ended == "oom" else None,
        replayed_events=result.steps,
        device_allocs=device.device_allocs,
        timeline=tuple(
            replay.TimelinePoint(step.step, step.peak_reserved, step.peak_allocated, 0)
            for step in device.steps
        ),
    )


def _failed_request(result: RunResult) -> replay.FailedRequest:
    device = result.fullest_device
    return replay.FailedRequest(
        result.steps,
        result.requested_bytes or 0,
        device.peak_reserved,
        device.peak_allocated,
        device.stranded,
    )
