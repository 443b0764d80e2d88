"""The summary of one process's run, finished or dead: a small file that outlives its sample.

The SDK writes it at the end, in the run directory. For a process that died without an end, a
reader makes it from the last sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from torchmem.explain.headline import growth_sentence, short_headline
from torchmem.explain.oom_report import MAX_TIMESTAMP
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import SAMPLE_SUFFIX
from torchmem.sample.run_history import Growth
from torchmem.sample.sample import Counters, DeviceSample, OomRecord, Process, Sample, State
from torchmem.sample.untrusted import convert, sanitize_json, strict_json

SCHEMA_VERSION = 1
SUMMARY_SUFFIX = ".summary.json"
MAX_SUMMARY_BYTES = 64 * 1024
_FAMILIES: dict[State, str] = {
    "running": "still runs",
    "stalled": "has stalled",
    "exited": "ended by itself",
    "failed": "ended with an exception other than an OutOfMemoryError",
    "oom": "ran out of memory",
    "killed": "was killed",
}


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """One device over the whole run, in bytes. None is unknown.

    `*_peak_bytes` are the highest values since the process started. `headroom_bytes` is what was
    left of the GPU at the peak of reserved memory, with the memory outside of the process as it was
    at the end. `component_peaks` is what the peak of active bytes consisted of, and `components`
    what was allocated at the end. The other fields are those of `DeviceSample`.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    active_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    headroom_bytes: int | None = None
    component_peaks: dict[str, int] = field(default_factory=dict)
    components: dict[str, int] = field(default_factory=dict)
    phase_peaks: dict[str, int] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    last_oom: OomRecord | None = None
    growth: Growth | None = None


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What one process used from its start to `timestamp`, in Unix seconds.

    `state` is how it ended. `verdict` says it in a sentence. `mean_step_seconds` is None before the
    second step. `allocator_settings` are those in effect.
    """

    timestamp: float
    process: Process
    state: State
    verdict: str
    steps: int
    mean_step_seconds: float | None = None
    devices: tuple[DeviceSummary, ...] = ()
    allocator_settings: dict[str, str] = field(default_factory=dict)
    schema: int = SCHEMA_VERSION


def summarize(sample: Sample, state: State) -> RunSummary:
    """Return the summary of a process, from its last sample."""
    return RunSummary(
        timestamp=sample.timestamp,
        process=sample.process,
        state=state,
        verdict=_verdict(sample, state),
        steps=sample.steps.count,
        mean_step_seconds=sample.steps.mean_seconds,
        devices=tuple(map(_device, sample.devices)),
        allocator_settings=sample.allocator_settings,
    )


def summary_name(sample: str) -> str:
    """Return the file name of a process's summary, given the name of its sample."""
    return sample.removesuffix(SAMPLE_SUFFIX) + SUMMARY_SUFFIX


def encode(summary: RunSummary) -> bytes:
    """Return the summary as one line of UTF-8 JSON."""
    return json.dumps(asdict(summary), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(data: bytes) -> RunSummary:
    """Return the summary that `encode` wrote.

    Raises UsageError for anything else; its text completes a sentence that begins with the file.
    """
    try:
        raw = strict_json(data)
        schema = raw.get("schema") if isinstance(raw, dict) else None
        if type(schema) is int and schema > SCHEMA_VERSION:
            raise UsageError("was written by a newer torchmem: run pip install --upgrade torchmem.")
        summary = convert(sanitize_json(raw), RunSummary)
        if summary.schema != SCHEMA_VERSION or summary.timestamp > MAX_TIMESTAMP:
            raise ValueError("its schema or its time is out of bounds")  # noqa: TRY301 - likewise
        return summary  # noqa: TRY300 - what `convert` raises is caught as well
    except ValueError as error:
        raise UsageError(f"is not the summary of a run: {error}.") from None


def _device(device: DeviceSample) -> DeviceSummary:
    allocator = device.allocator
    return DeviceSummary(
        index=device.index,
        uuid=device.uuid,
        name=device.name,
        total_bytes=device.total_bytes,
        allocated_peak_bytes=allocator.allocated_peak_bytes if allocator else None,
        active_peak_bytes=allocator.active_peak_bytes if allocator else None,
        reserved_peak_bytes=allocator.reserved_peak_bytes if allocator else None,
        headroom_bytes=headroom_at_peak(device),
        component_peaks=device.component_peaks,
        components=device.components,
        phase_peaks=device.phase_peaks,
        counters=device.counters,
        last_oom=device.last_oom,
        growth=device.growth,
    )


def headroom_at_peak(device: DeviceSample) -> int | None:
    """Return what was left of a device at its peak of reserved bytes; None if that is unknown.

    It is what the process could reserve now, with what it has, less the peak.
    """
    allocator, free = device.allocator, device.driver_free_bytes
    if allocator is None or free is None or allocator.reserved_peak_bytes is None:
        return None
    if device.shares_host_memory:
        return None
    return max(0, free + allocator.reserved_bytes.total - allocator.reserved_peak_bytes)


def _verdict(sample: Sample, state: State) -> str:
    steps = f"after {sample.steps.count:,} step{'s' * (sample.steps.count != 1)}"
    return ". ".join([f"It {_FAMILIES[state]} {steps}", *_reasons(sample, state)]) + "."


def _reasons(sample: Sample, state: State) -> Iterator[str]:
    for device in sample.devices:
        where = f"cuda:{device.index}: " if len(sample.devices) > 1 else ""
        if state == "oom" and device.last_oom:
            yield f"{where}{_capitalized(short_headline(device.last_oom))}"
        elif device.growth:
            yield f"{where}{growth_sentence(device.growth, None)}"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
