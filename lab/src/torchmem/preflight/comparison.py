"""Other allocator settings and other GPUs, replayed from a run's trace.

They are compared only if the replay is exact: it places every allocation at its recorded address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchmem.phantom.gpus import CATALOG, GpuModel
from torchmem.preflight.options import PreflightOptions
from torchmem.preflight.result import RunResult
from torchmem.sample.errors import UsageError
from torchmem.trace import read
from torchmem.trace.recording import Recording
from torchmem.whatif import result as replay
from torchmem.whatif.engine import SimulatedGpuMemory, on_gpus, what_if
from torchmem.whatif.page import Progress

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

    settings: replay.WhatIf
    gpus: tuple[GpuModelRow, ...]


def compare(
    options: PreflightOptions, traced: RunResult, traced_on: GpuModel
) -> PreflightComparison:
    """Compare settings and GPUs.

    traced, traced_on: the run whose trace is replayed and its GPU, a larger one than requested if
    the script ran out of memory.

    Raises:
        UsageError: the trace cannot be replayed exactly.
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
    fidelity = replayed.fidelity
    if not (fidelity.trusted and fidelity.share == 1):
        raise UsageError(
            f"the replay of the trace is not exact ({fidelity.landed:,} of "
            f"{fidelity.allocations:,} allocations get the recorded address): run each with "
            "--matrix, such as --matrix alloc_conf=,expandable_segments:True."
        )
    memory = traced_on.memory_bytes
    own = SimulatedGpuMemory(traced_on.name, memory - device.outside, memory)
    libraries = device.outside - traced_on.context_bytes
    rows = _replayed_gpus(recording, own, gpus, libraries, replayed)
    return PreflightComparison(replayed, rows)


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
