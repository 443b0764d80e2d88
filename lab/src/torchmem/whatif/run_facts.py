"""What is known about a recorded run: its settings, its memory before the trace, and its GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torchmem.allocator.sizes import LARGE_BUFFER
from torchmem.sample.errors import UsageError
from torchmem.simulator.blocks import block_order
from torchmem.trace.recording import Event, Recording
from torchmem.whatif.inference import Inference, infer
from torchmem.whatif.initial_memory import InitialMemory
from torchmem.whatif.result import GpuSource
from torchmem.whatif.settings import Candidate, recorded_settings


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A recording with its settings, what it tells of the memory before it, and the GPU.

    `inferences` are possible explanations of the recording, the best first; they agree on the
    memory `before` its first event.

    `gpu_bytes` is what PyTorch can get of the GPU, and `total_bytes` all of its memory; None if
    unknown. `fits_gpu` is False if the recording reserved more than the GPU has, so that the GPU
    cannot be the recorded one. `limit_bytes` is what the garbage collection takes a share of; None
    if it does not run, or if the limit is unknown.
    """

    recording: Recording
    settings: Candidate
    inferences: tuple[Inference, ...]
    gpu_bytes: int | None
    total_bytes: int | None
    gpu_source: GpuSource | None
    fits_gpu: bool
    limit_bytes: int | None

    @property
    def before(self) -> InitialMemory:
        """The memory before the first event."""
        return self.inferences[0].before

    @property
    def events(self) -> int:
        """The length of the trace."""
        return len(self.recording.events)

    @property
    def peak_reserved(self) -> int:
        """The peak of reserved bytes, counted from the recorded segments."""
        return max(reserved_over_time(self.recording, self.before))


def run_facts(
    recording: Recording,
    gpu_bytes: int | None,
    total_bytes: int | None,
    versions: Mapping[str, str],
) -> RunFacts:
    """Return what is known about a recording. Arguments and errors are those of `what_if`."""
    if any(size is not None and size <= 0 for size in (gpu_bytes, total_bytes)):
        raise UsageError("the memory of the GPU must be more than 0 bytes.")
    settings = recorded_settings(recording)
    facts = recording.facts
    total_bytes = total_bytes or facts.total_bytes
    order = block_order(versions.get("torch", facts.torch_version))
    inferences = infer(recording, settings.config, order)
    before = inferences[0].before
    gpu, source = find_gpu(recording, before, gpu_bytes)
    if gpu is None and facts.reserved_bytes is not None and facts.free_bytes is not None:
        gpu, source = facts.reserved_bytes + facts.free_bytes, "capture"
        gpu = gpu if facts.limit_bytes is None else min(gpu, facts.limit_bytes)
    if source in {"oom", "capture"}:  # `gpu` is what the memory fraction allowed: apply it once
        config = replace(settings.config, per_process_memory_fraction=1.0)
        settings = replace(settings, config=config)
    peak = max(reserved_over_time(recording, before))
    fits_gpu = gpu is not None and (source == "oom" or gpu >= peak)
    limit = _collection_limit(recording, gpu if fits_gpu else None)
    return RunFacts(recording, settings, inferences, gpu, total_bytes, source, fits_gpu, limit)


def _collection_limit(recording: Recording, gpu_bytes: int | None) -> int | None:
    """Return the memory limit that PyTorch has; without one, it collects no garbage."""
    limit, total = recording.facts.limit_bytes, recording.facts.total_bytes
    if limit is None:
        return gpu_bytes
    return limit if total is not None and limit < total else None


def reserved_over_time(recording: Recording, before: InitialMemory) -> Iterator[int]:
    """Yield the reserved bytes before each event and after the last, from the recorded segments."""
    reserved = sum(segment["total_size"] for segment in before.segments)
    yield reserved
    for event in recording.events:
        if event.action in {"segment_alloc", "segment_map"}:
            reserved += event.size
        elif event.action in {"segment_free", "segment_unmap"}:
            reserved -= event.size
        yield reserved


def find_gpu(
    recording: Recording, before: InitialMemory, given: int | None
) -> tuple[int | None, GpuSource | None]:
    """Return what PyTorch could get at most: from the last OOM of the trace, otherwise `given`.

    If a request failed although the driver had room, the process had a limit of its own. That limit
    is between the peak of reserved memory and what the request would have made of it: `given` if it
    is in that range, otherwise the peak.
    """
    gpu, peak, limit_below = None, 0, 0
    reserved_before = reserved_over_time(recording, before)
    for event, reserved in zip(recording.events, reserved_before, strict=False):
        peak = max(peak, reserved)
        if event.action != "oom" or event.device_free is None:
            continue
        gpu, limit_below = reserved + event.device_free, 0
        if met_limit(event):
            gpu, limit_below = peak, reserved + max(event.size, LARGE_BUFFER)
    if gpu is not None and not (given is not None and peak <= given < limit_below):
        return gpu, "oom"
    return given, None if given is None else "given"


def met_limit(event: Event) -> bool:
    """Return whether a request failed although the driver had room for it."""
    return event.device_free is not None and event.device_free >= max(event.size, LARGE_BUFFER)
