"""Whether a run fits its GPU, in one sentence; the exit code follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import OomReport
from torchmem.output.terminal import counted
from torchmem.phantom.gpus import GpuModel
from torchmem.preflight.growth import GpuGrowth, first_growth, growth_before_oom
from torchmem.preflight.result import GpuMemory, RunResult


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """Whether the run fits the GPU, and a sentence that explains it.

    fits_with: PYTORCH_CUDA_ALLOC_CONF with which it fits if it does not fit with its own. growth:
    what grows from step to step, if anything does; a run in which it decides does not fit.
    """

    fits: bool
    sentence: str
    fits_with: str | None = None
    growth: GpuGrowth | None = None

    @property
    def grows(self) -> bool:
        """Whether it does not fit because memory grows."""
        return self.growth is not None and self.growth.decides


def judge(
    gpu: GpuModel, result: RunResult, oom: OomReport | None, larger_run: RunResult | None
) -> FitVerdict:
    """Return the verdict on a run. larger_run: the same with more memory, if it ran out of it."""
    if result.ended == "oom":
        return _does_not_fit(gpu, result, oom, larger_run)
    found, sentence = first_growth(result), _fits(gpu, result)
    if found is None or not found.decides:
        return FitVerdict(True, sentence, growth=found)
    return FitVerdict(False, f"{growth_sentence(found, result)} {sentence}", growth=found)


def phantom_name(gpu: GpuModel) -> str:
    """Return the GPU's product name, marked as a phantom."""
    return f"phantom {gpu.product}"


def growth_sentence(found: GpuGrowth, result: RunResult) -> str:
    """Return what grows, when the GPU is full, and what the cause may be."""
    step = result.step_name.split()[-1]
    where = f" on cuda:{found.device}" if len(result.devices) > 1 else ""
    full = _full(found.steps_left, step, result)
    if found.kind == "larger_step":
        more = f"Each {step} needs {format_size(found.bytes_per_step)} more{where}, {full}"
        return f"{more}: batches or sequences that get longer, or a graph that is kept."
    cause = "a cache, a leak," if step == "call" else "a leak,"
    more = f"Grows by {format_size(found.bytes_per_step)} a {step}{where}, {full}"
    return f"{more}: {cause} or data that the script accumulates."


def _full(left: int, step: str, result: RunResult) -> str:
    """Return when the GPU is full."""
    if left:
        return f"full after about {counted(left, f'more {step}')}"
    return f"full after {counted(result.steps or result.calls, step)}"


def _fits(gpu: GpuModel, result: RunResult) -> str:
    device = result.fullest_device
    used, share = device.total - device.headroom, device.headroom / device.total
    where = f" on cuda:{device.device}, the fullest" if len(result.devices) > 1 else ""
    problems = _problems(device)
    found = first_growth(result)
    return (
        f"{_fit(problems, found, result)} a {phantom_name(gpu)}: it takes "
        f"{format_size(used)} of {format_size(device.total)}{where}, including the CUDA context, "
        f"and leaves {format_size(device.headroom)} ({share:.0%}){problems}."
    )


def _fit(problems: str, found: GpuGrowth | None, result: RunResult) -> str:
    """Return how the run fits; one that grows does so only for the steps that were done."""
    fits = "Barely fits" if problems else "Fits"
    if found is None or not found.decides:
        return fits
    done = counted(result.steps or result.calls, result.step_name.split()[-1])
    return f"For {done} it {fits.lower()}"


def _does_not_fit(
    gpu: GpuModel, result: RunResult, oom: OomReport | None, larger_run: RunResult | None
) -> FitVerdict:
    """Return the verdict on a run that ran out of memory; a larger one shows what grows."""
    failed, needed = _failed_request(result, oom), _memory_needed(gpu, larger_run)
    found = growth_before_oom(result, larger_run or result)
    grows = f"{growth_sentence(found, result)} " if found else ""
    sentence = f"{grows}Does not fit a {phantom_name(gpu)}: {failed}{needed}."
    return FitVerdict(False, sentence, growth=found)


def _failed_request(result: RunResult, oom: OomReport | None) -> str:
    size = oom.oom.requested_bytes if oom else result.requested_bytes
    request = "a request" if size is None else f"a request for {format_size(size)}"
    when = f"in step {result.steps + 1:,}" if result.steps else "before the end of its first step"
    if not result.devices:
        return f"{when}, {request} failed"
    device = result.fullest_device
    available = f"of the {format_size(device.total - device.outside)} available to PyTorch"
    if oom is not None and oom.device.allocator is not None:
        allocated = format_size(oom.device.allocator.allocated_bytes.total)
        return f"{when}, {request} failed while tensors held {allocated} {available}"
    peak = format_size(device.peak_allocated)
    return f"{when}, {request} failed after tensors had held up to {peak} {available}"


def _memory_needed(gpu: GpuModel, larger_run: RunResult | None) -> str:
    if larger_run is None or not larger_run.devices:
        return ""
    device = larger_run.fullest_device
    if larger_run.ended == "oom":
        return f"; it does not fit {format_size(device.total)} either"
    tensors, outside = format_size(device.peak_allocated), format_size(device.outside)
    return (
        f"; with more memory its tensors hold up to {tensors}, {outside} are outside PyTorch, and "
        f"the GPU has {format_size(gpu.memory_bytes)}"
    )


def _problems(device: GpuMemory) -> str:
    """Return what went wrong without ending the run."""
    problems = ""
    if device.retries:
        problems += (
            f"; PyTorch had to empty its cache {counted(device.retries, 'time')} to satisfy a "
            "request (a retry, which stalls the GPU)"
        )
    if device.ooms:
        problems += (
            f"; {counted(device.ooms, 'request')} failed with an OutOfMemoryError that the script "
            "caught"
        )
    return problems
