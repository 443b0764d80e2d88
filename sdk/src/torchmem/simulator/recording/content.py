"""The content of an unpickled snapshot, checked and reduced to what a replay needs.

Shape: `THCPModule_memorySnapshot` in torch/csrc/cuda/Module.cpp, PyTorch 2.1 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchmem.simulator.recording.columns import Columns, check_trace
from torchmem.simulator.recording.fields import LIMIT, MAX_DEVICES, a_dict, a_list
from torchmem.simulator.recording.refusal import HOW_TO_RECORD, RefusedError, damaged
from torchmem.simulator.recording.segments import DeviceSegments, check_segments
from torchmem.simulator.recording.trace import RecordedSegment

MAX_EVENTS = 10_000_000
MIN_EVENT_BYTES = 24
"""No pickle of an entry that PyTorch writes is shorter: a file with more events repeats one many times."""
MAX_SETTINGS = 64
MAX_SETTING_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Content:
    """What is kept: traces of the devices that have one, segments by device, settings."""

    traces: Mapping[int, Columns]
    segments: Mapping[int, list[RecordedSegment]]
    settings: Mapping[str, object]


def check(snapshot: object, file_bytes: int) -> Content:
    """The content of a snapshot that was read from so many bytes; raises RefusedError."""
    if type(snapshot) is list:
        raise RefusedError(
            "holds segments without the trace of allocations, as torch.cuda.memory_snapshot() and older versions give "
            f"them: to record one, {HOW_TO_RECORD}."
        )
    if type(snapshot) is not dict or not {"segments", "device_traces"} <= snapshot.keys():
        raise damaged("it has no segments and device_traces")
    devices = check_segments(snapshot["segments"])
    traces = _unchecked_traces(a_list(snapshot["device_traces"], "device_traces"), file_bytes)
    if not traces:
        raise RefusedError(_no_trace(has_segments=bool(devices)))
    segments = {device: found.segments for device, found in devices.items()}
    return Content(_with_allocations(traces, devices), segments, _settings(snapshot.get("allocator_settings", {})))


def _unchecked_traces(found: list[object], file_bytes: int) -> dict[int, list[object]]:
    """Those that are not empty, by device; few enough events to look at each."""
    if len(found) > MAX_DEVICES:
        raise damaged("it has more devices than PyTorch knows")
    traces = {device: a_list(trace, f"the trace of device {device}") for device, trace in enumerate(found) if trace}
    events = sum(map(len, traces.values()))
    if events > MAX_EVENTS:
        raise RefusedError(
            f"holds more than {MAX_EVENTS:,} events, more than can be replayed: record fewer steps, or with "
            "_record_memory_history(max_entries=1_000_000)."
        )
    if events * MIN_EVENT_BYTES > file_bytes:
        raise damaged("it repeats events instead of writing each")
    return traces


def _with_allocations(traces: Mapping[int, list[object]], devices: Mapping[int, DeviceSegments]) -> dict[int, Columns]:
    none = DeviceSegments([], {})
    columns = {
        device: check_trace(trace, device, devices.get(device, none).with_stack) for device, trace in traces.items()
    }
    found = {device: trace for device, trace in columns.items() if trace.has_allocations()}
    if not found:
        raise RefusedError(
            "holds a trace without a single allocation: record while the job works, and without skip_actions; that is, "
            f"{HOW_TO_RECORD}."
        )
    return found


def _no_trace(*, has_segments: bool) -> str:
    if has_segments:
        return f"holds no allocation trace, only the memory at its end: to record one, {HOW_TO_RECORD}."
    return f"holds no GPU memory at all, as in a run on the CPU: in the process that uses the GPU, {HOW_TO_RECORD}."


def _settings(found: object) -> dict[str, object]:
    """Scalars, and mappings to scalars (roundup_power2_divisions); anything else is left out."""
    settings = a_dict(found, "allocator_settings")
    if len(settings) > MAX_SETTINGS:
        raise damaged("allocator_settings has too many entries")
    return {
        name: value for name, value in settings.items() if _is_name(name) and (_is_scalar(value) or _is_table(value))
    }


def _is_table(value: object) -> bool:
    return (
        type(value) is dict
        and len(value) <= MAX_SETTINGS
        and all(_is_name(name) and _is_scalar(item) for name, item in value.items())
    )


def _is_name(value: object) -> bool:
    return type(value) is str and len(value) <= 100


def _is_scalar(value: object) -> bool:
    if type(value) is int:
        return -LIMIT <= value < 2 * LIMIT
    return type(value) in {bool, float} or (type(value) is str and len(value) <= MAX_SETTING_CHARACTERS)
