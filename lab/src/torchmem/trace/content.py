"""Checks the content of an unpickled snapshot and reduces it to what a replay needs.

Each field must have exactly the type that PyTorch writes, numbers must fit in 63 bits, segments
must not overlap, and blocks must fill their segments. For the shape, see
`THCPModule_memorySnapshot` in torch/csrc/cuda/Module.cpp, PyTorch 2.0 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, get_args

from torchmem.allocator.snapshot import DEFAULT_POOL, BlockState
from torchmem.trace.annotations import Annotation, checked_annotations
from torchmem.trace.checked_values import (
    HOW_TO_RECORD,
    LIMIT,
    InvalidSnapshotError,
    checked_dict,
    checked_integer,
    checked_list,
    checked_pool,
    damaged,
)
from torchmem.trace.events import TraceReader
from torchmem.trace.open_traces import OpenTraces
from torchmem.trace.recording import RecordedBlock, RecordedSegment
from torchmem.trace.stacks import StackTable

MAX_DEVICES = 128  # C10_COMPILE_TIME_MAX_GPUS is 120
MAX_BLOCKS = 1_000_000
MAX_EVENTS = 50_000_000
MIN_EVENT_BYTES = 24
"""The shortest pickle of a trace entry; a file with more events repeats one entry many times."""
MAX_SETTINGS = 64
MAX_SETTING_LENGTH = 4096
MAX_NAME_LENGTH = 100
STATES: tuple[BlockState, ...] = get_args(BlockState)


@dataclass(frozen=True, slots=True)
class DeviceSegments:
    """The segments of one device by address, and the stack of each block in use by its address."""

    segments: list[RecordedSegment] = field(default_factory=list)
    stacks: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Content:
    """The traces of the devices that have one, the segments by device, settings, and annotations.

    `table` has the stacks and texts to which their numbers refer.
    """

    traces: Mapping[int, TraceReader]
    segments: Mapping[int, DeviceSegments]
    settings: Mapping[str, object]
    annotations: Sequence[Annotation]
    table: StackTable


def check(
    snapshot: object,
    file_bytes: int,
    *,
    needs_trace: bool = True,
    traces: OpenTraces | None = None,
) -> Content:
    """Return the content of a snapshot that was unpickled from a file of `file_bytes` bytes.

    Its traces are emptied; `traces` are those that were read while it was unpickled. Without
    `needs_trace`, segments alone suffice, also the list of `torch.cuda.memory_snapshot()`.

    Raises:
        InvalidSnapshotError: the snapshot cannot be used.
    """
    if not needs_trace:
        snapshot = as_dict(snapshot)
    if type(snapshot) is list:
        raise InvalidSnapshotError(
            "has segments but no trace of allocations, like the result of "
            f"torch.cuda.memory_snapshot() and of older versions. To record one, {HOW_TO_RECORD}."
        )
    if type(snapshot) is not dict or not {"segments", "device_traces"} <= snapshot.keys():
        raise damaged("it has no segments and device_traces")
    known = traces or OpenTraces()
    devices = check_segments(snapshot["segments"], known.table)
    lists = _nonempty_traces(checked_list(snapshot["device_traces"], "device_traces"), file_bytes)
    if not lists and (needs_trace or not devices):
        raise InvalidSnapshotError(_no_trace(has_segments=bool(devices)))
    finished = {
        device: _finished(known.reader(trace), trace, device, devices)
        for device, trace in lists.items()
    }
    return Content(
        _with_allocations(finished) if needs_trace else finished,
        devices,
        _settings(snapshot.get("allocator_settings", {})),
        list(checked_annotations(snapshot.get("external_annotations"), known.table)),
        known.table,
    )


def _finished(
    reader: TraceReader, trace: list[Any], device: int, devices: Mapping[int, DeviceSegments]
) -> TraceReader:
    """Read what is left of a trace."""
    reader.take(trace, device)
    reader.finish(devices[device].stacks if device in devices else {})
    return reader


def _nonempty_traces(traces: list[object], file_bytes: int) -> dict[int, list[object]]:
    """Return the traces with events by device; their total length is bounded."""
    if len(traces) > MAX_DEVICES:
        raise damaged("it has more devices than PyTorch supports")
    by_device = {
        device: checked_list(trace, f"the trace of device {device}")
        for device, trace in enumerate(traces)
        if trace
    }
    events = sum(map(len, by_device.values()))
    if events > MAX_EVENTS:
        raise InvalidSnapshotError(
            f"has more than {MAX_EVENTS:,} events, which is the limit: record fewer steps, or with "
            "_record_memory_history(max_entries=1_000_000)."
        )
    if events * MIN_EVENT_BYTES > file_bytes:
        raise damaged("it refers to the same events many times")
    return by_device


def as_dict(snapshot: Any) -> Any:
    """Return the list of `torch.cuda.memory_snapshot()` as a snapshot without traces."""
    return {"segments": snapshot, "device_traces": []} if type(snapshot) is list else snapshot


def _with_allocations(traces: Mapping[int, TraceReader]) -> dict[int, TraceReader]:
    found = {device: trace for device, trace in traces.items() if trace.columns.has_allocations()}
    if not found:
        raise InvalidSnapshotError(
            "has a trace without allocations: record while the job is training, without "
            f"skip_actions. To do so, {HOW_TO_RECORD}."
        )
    return found


def _no_trace(*, has_segments: bool) -> str:
    if has_segments:
        return f"has segments but no trace of allocations. To record one, {HOW_TO_RECORD}."
    return (
        "has no GPU memory, as in a run on the CPU: in the process that uses the GPU, "
        f"{HOW_TO_RECORD}."
    )


def check_segments(value: object, table: StackTable) -> dict[int, DeviceSegments]:
    """Return the segments by device. Raise InvalidSnapshotError if they cannot be used."""
    devices: dict[int, DeviceSegments] = {}
    remaining = MAX_BLOCKS
    for number, element in enumerate(checked_list(value, "segments")):
        where = f"segment {number}"
        entry = checked_dict(element, where)
        device = checked_integer(entry, "device", where, limit=MAX_DEVICES)
        of_device = devices.setdefault(device, DeviceSegments())
        blocks = _Blocks(of_device.stacks, table)
        segment = _segment(entry, where, remaining, blocks)
        remaining -= len(segment.blocks)
        of_device.segments.append(segment)
    for of_device in devices.values():
        of_device.segments.sort(key=lambda segment: segment.address)
        for left, right in pairwise(of_device.segments):
            if left.address + left.total_size > right.address:
                raise damaged("segments overlap")
    return dict(sorted(devices.items()))


def _segment(
    entry: dict[Any, Any], where: str, max_blocks: int, reader: _Blocks
) -> RecordedSegment:
    blocks = checked_list(entry.get("blocks"), f"the block list of {where}")
    if len(blocks) > max_blocks:
        raise InvalidSnapshotError(
            f"has more than {MAX_BLOCKS:,} blocks, which is the limit: record a shorter run."
        )
    segment = RecordedSegment(
        address=checked_integer(entry, "address", where),
        total_size=checked_integer(entry, "total_size", where, minimum=1),
        stream=checked_integer(entry, "stream", where, minimum=-LIMIT),
        is_small=entry.get("segment_type") == "small",
        is_expandable=entry.get("is_expandable") is True,
        pool=checked_pool(entry.get("segment_pool_id", DEFAULT_POOL), where),
        blocks=reader.read(blocks, checked_integer(entry, "address", where), where),
    )
    if entry.get("segment_type") not in ("small", "large"):
        raise damaged(f"{where} is neither small nor large")
    if sum(block.size for block in segment.blocks) != segment.total_size:
        raise damaged(f"the blocks of {where} do not fill it")
    return segment


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Reads the blocks of a device, and numbers their stacks."""

    stacks: dict[int, int]
    table: StackTable

    def read(self, elements: list[Any], address: int, where: str) -> tuple[RecordedBlock, ...]:
        """Return the blocks of one segment."""
        blocks = []
        for number, element in enumerate(elements):
            name = f"block {number} of {where}"
            entry = checked_dict(element, name)
            newest = _newest_allocation(entry, name)
            block = _block(entry, newest, address, name)
            if block.address != address:
                raise damaged(f"{name} does not follow the one before it")
            if block.state != "inactive":
                frames = newest.get("frames"), newest.get("forward_frames")
                self.stacks[address] = self.table.number(*frames)
            blocks.append(block)
            address += block.size
        return tuple(blocks)


def _newest_allocation(block: dict[Any, Any], where: str) -> dict[Any, Any]:
    """Return what has the stack of a block.

    PyTorch 2.0 writes a list of the allocations that a block has served, the newest first.
    """
    if "history" not in block:
        return block
    history = checked_list(block["history"], f"the history of {where}")
    return checked_dict(history[0], f"the history of {where}") if history else {}


def _block(
    entry: dict[Any, Any], newest: dict[Any, Any], address: int, where: str
) -> RecordedBlock:
    """Return a block; those of PyTorch 2.0 have no address, and follow each other."""
    has_requested = "requested_size" in entry
    requested = checked_integer(entry, "requested_size", where) if has_requested else None
    if requested is None and "real_size" in newest:
        requested = checked_integer(newest, "real_size", where)
    return RecordedBlock(
        address=checked_integer(entry, "address", where) if "address" in entry else address,
        size=checked_integer(entry, "size", where, minimum=1),
        requested_size=requested,
        state=_state(entry, where),
    )


def _state(entry: dict[Any, Any], where: str) -> BlockState:
    state = entry.get("state")
    # The docstring of `torch.cuda.memory._snapshot` has this name; the C++ code does not.
    state = "active_pending_free" if state == "active_awaiting_free" else state
    for known in STATES:
        if state == known:
            return known
    raise damaged(f"{where} has an unknown state")


def _settings(value: object) -> dict[str, object]:
    """Return scalars and mappings to scalars (roundup_power2_divisions); drop anything else."""
    settings = checked_dict(value, "allocator_settings")
    if len(settings) > MAX_SETTINGS:
        raise damaged("allocator_settings has too many entries")
    return {
        name: setting
        for name, setting in settings.items()
        if _is_name(name) and (_is_scalar(setting) or _is_table(setting))
    }


def _is_table(value: object) -> bool:
    return (
        type(value) is dict
        and len(value) <= MAX_SETTINGS
        and all(_is_name(name) and _is_scalar(item) for name, item in value.items())
    )


def _is_name(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_NAME_LENGTH


def _is_scalar(value: object) -> bool:
    if type(value) is int:
        return -LIMIT <= value < 2 * LIMIT
    is_text = type(value) is str and len(value) <= MAX_SETTING_LENGTH
    return is_text or type(value) in {bool, float}
