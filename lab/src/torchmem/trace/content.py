"""Checks the content of an unpickled snapshot and reduces it to what a replay needs.

Each field must have exactly the type that PyTorch writes, numbers must fit in 63 bits, segments
must not overlap, and blocks must fill their segments. Stacks are dropped. For the shape, see
`THCPModule_memorySnapshot` in torch/csrc/cuda/Module.cpp, PyTorch 2.1 to 2.13.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, get_args

from torchmem.allocator.snapshot import DEFAULT_POOL, BlockState, PoolId
from torchmem.trace.recording import RecordedBlock, RecordedSegment

HOW_TO_RECORD = (
    "call torch.cuda.memory._record_memory_history(max_entries=1_000_000) before training and "
    "torch.cuda.memory._dump_snapshot(FILE) after some steps, or run `torchmem capture --rank N`"
)
LIMIT = 1 << 63
MAX_DEVICES = 128  # C10_COMPILE_TIME_MAX_GPUS is 120
MAX_BLOCKS = 1_000_000
MAX_EVENTS = 10_000_000
MIN_EVENT_BYTES = 24
"""The shortest pickle of a trace entry; a file with more events repeats one entry many times."""
MAX_SETTINGS = 64
MAX_SETTING_LENGTH = 4096
MAX_NAME_LENGTH = 100

ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
STATES: tuple[BlockState, ...] = get_args(BlockState)
_CODES = {action: code for code, action in enumerate(ACTIONS)}
_ALLOC = _CODES["alloc"]
_FREE_REQUESTED, _FREE_COMPLETED = _CODES["free_requested"], _CODES["free_completed"]
_OOM, _SNAPSHOT = _CODES["oom"], _CODES["snapshot"]


class InvalidSnapshotError(Exception):
    """A snapshot that cannot be used; the text completes a sentence that starts with its name."""


@dataclass(slots=True)
class EventColumns:
    """The events of one device, one array per field.

    `codes` are indexes into ACTIONS. `pools` are indexes into `pool_ids`, or -1 if the event has no
    pool. `truncated` and `ignored` are as in `Recording`.
    """

    codes: array[int] = field(default_factory=lambda: array("b"))
    addresses: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    streams: array[int] = field(default_factory=lambda: array("q"))
    pools: array[int] = field(default_factory=lambda: array("i"))
    device_free: dict[int, int] = field(default_factory=dict)
    pool_ids: dict[PoolId, int] = field(default_factory=dict)
    ignored: int = 0
    truncated: bool | None = None

    def arrays(self) -> tuple[array[int], ...]:
        """Return the arrays with one element per event."""
        return self.codes, self.addresses, self.sizes, self.streams, self.pools

    def has_allocations(self) -> bool:
        """Return whether any memory was allocated."""
        return _ALLOC in self.codes


@dataclass(frozen=True, slots=True)
class DeviceSegments:
    """The segments of one device by address.

    `has_stack` maps the address of each block in use to whether the block has a recorded stack.
    """

    segments: list[RecordedSegment]
    has_stack: dict[int, bool]


@dataclass(frozen=True, slots=True)
class Content:
    """The traces of the devices that have one, the segments by device, and the settings."""

    traces: Mapping[int, EventColumns]
    segments: Mapping[int, list[RecordedSegment]]
    settings: Mapping[str, object]


def check(snapshot: object, file_bytes: int, *, needs_trace: bool = True) -> Content:
    """Return the content of a snapshot that was unpickled from a file of `file_bytes` bytes.

    Without `needs_trace`, segments alone suffice, also the list of
    `torch.cuda.memory_snapshot()`.

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
    devices = check_segments(snapshot["segments"])
    traces = _nonempty_traces(_list(snapshot["device_traces"], "device_traces"), file_bytes)
    if not traces and (needs_trace or not devices):
        raise InvalidSnapshotError(_no_trace(has_segments=bool(devices)))
    return Content(
        _with_allocations(traces, devices)
        if needs_trace
        else _checked_traces(traces, devices, consumes=False),
        {device: of_device.segments for device, of_device in devices.items()},
        _settings(snapshot.get("allocator_settings", {})),
    )


def damaged(problem: str) -> InvalidSnapshotError:
    """Return the error for content that no supported version of PyTorch writes."""
    return InvalidSnapshotError(
        f"is not a snapshot as PyTorch 2.1 and newer write it ({problem}): record another one and "
        "do not modify the file of torch.cuda.memory._dump_snapshot."
    )


def _nonempty_traces(traces: list[object], file_bytes: int) -> dict[int, list[object]]:
    """Return the traces with events by device; their total length is bounded."""
    if len(traces) > MAX_DEVICES:
        raise damaged("it has more devices than PyTorch supports")
    by_device = {
        device: _list(trace, f"the trace of device {device}")
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


def _checked_traces(
    traces: Mapping[int, list[object]], devices: Mapping[int, DeviceSegments], *, consumes: bool
) -> dict[int, EventColumns]:
    return {
        device: check_trace(
            trace, device, devices[device].has_stack if device in devices else {}, consumes=consumes
        )
        for device, trace in traces.items()
    }


def _with_allocations(
    traces: Mapping[int, list[object]], devices: Mapping[int, DeviceSegments]
) -> dict[int, EventColumns]:
    checked = _checked_traces(traces, devices, consumes=True)
    columns = {device: column for device, column in checked.items() if column.has_allocations()}
    if not columns:
        raise InvalidSnapshotError(
            "has a trace without allocations: record while the job is training, without "
            f"skip_actions. To do so, {HOW_TO_RECORD}."
        )
    return columns


def _no_trace(*, has_segments: bool) -> str:
    if has_segments:
        return f"has segments but no trace of allocations. To record one, {HOW_TO_RECORD}."
    return (
        "has no GPU memory, as in a run on the CPU: in the process that uses the GPU, "
        f"{HOW_TO_RECORD}."
    )


def check_trace(
    trace: list[Any], device: int, has_stack: Mapping[int, bool], *, consumes: bool = False
) -> EventColumns:
    """Return the columns of a trace, oldest event first. `has_stack` is as in `DeviceSegments`.

    With `consumes`, each event is removed from the trace: its memory serves for the columns.

    Raises:
        InvalidSnapshotError: the trace cannot be used.
    """
    columns = EventColumns()
    live: set[int] = set()
    unmatched = False
    for number, element in enumerate(trace):
        if consumes:
            trace[number] = None
        entry = _dict(element, f"event {number} of device {device}")
        action = entry.get("action")
        code = _CODES.get(action) if type(action) is str else None
        if code is None:
            _check_ignorable(entry, device, number)
            columns.ignored += 1
            continue
        _append(columns, code, entry, device, number)
        if code == _ALLOC:
            live.add(entry["addr"])
        elif code == _FREE_COMPLETED:
            unmatched |= entry["addr"] not in live
            live.discard(entry["addr"])
    _check_frees(columns)
    columns.truncated = _is_truncated(has_stack, live, unmatched=unmatched)
    return columns


def _append(
    columns: EventColumns, code: int, entry: dict[Any, Any], device: int, number: int
) -> None:
    """Append one event; written for speed, because a long trace has millions of them."""
    size, stream = entry.get("size"), entry.get("stream", 0)
    address, pool = entry.get("addr"), entry.get("pool_id")
    if code == _OOM:
        where = f"event {number} of device {device}"
        columns.device_free[len(columns.codes)] = _integer(entry, "device_free", where)
        address = 0
    elif code == _SNAPSHOT:
        address = 0
    if (
        type(size) is not int
        or type(stream) is not int
        or type(address) is not int
        or not (code == _SNAPSHOT or size > 0)
        or not 0 <= size < LIMIT
        or not 0 <= address < LIMIT - size
        or not -LIMIT <= stream < LIMIT
    ):
        raise damaged(f"event {number} of device {device} has an invalid size, address or stream")
    columns.codes.append(code)
    columns.addresses.append(address)
    columns.sizes.append(size)
    columns.streams.append(stream)
    columns.pools.append(-1 if pool is None else _pool_index(columns, pool, number))


def _pool_index(columns: EventColumns, pool: object, number: int) -> int:
    return columns.pool_ids.setdefault(_pool(pool, f"event {number}"), len(columns.pool_ids))


def _check_ignorable(entry: dict[Any, Any], device: int, number: int) -> None:
    """Raise InvalidSnapshotError if an event with an unknown action affects memory."""
    if entry.get("addr") or entry.get("size"):
        action = str(entry.get("action"))[:40]
        raise InvalidSnapshotError(
            f"has an action that this version of torchmem does not know ({action!r}, event "
            f"{number} of device {device}): it is from a newer PyTorch. Run pip install --upgrade "
            "torchmem."
        )


def _check_frees(columns: EventColumns) -> None:
    if columns.codes.count(_FREE_REQUESTED) and not columns.codes.count(_FREE_COMPLETED):
        raise InvalidSnapshotError(
            "has no free_completed events, so it is unknown when memory was free again: record "
            "without skip_actions."
        )


def _is_truncated(has_stack: Mapping[int, bool], live: set[int], *, unmatched: bool) -> bool | None:
    """Return `Recording.truncated`."""
    missing = [stack for address, stack in has_stack.items() if address not in live]
    if any(missing):
        return True
    return None if missing or unmatched else False


def check_segments(value: object) -> dict[int, DeviceSegments]:
    """Return the segments by device. Raise InvalidSnapshotError if they cannot be used."""
    devices: dict[int, DeviceSegments] = {}
    remaining = MAX_BLOCKS
    for number, element in enumerate(_list(value, "segments")):
        where = f"segment {number}"
        entry = _dict(element, where)
        device = _integer(entry, "device", where, limit=MAX_DEVICES)
        of_device = devices.setdefault(device, DeviceSegments([], {}))
        segment = _segment(entry, where, remaining, of_device.has_stack)
        remaining -= len(segment.blocks)
        of_device.segments.append(segment)
    for of_device in devices.values():
        of_device.segments.sort(key=lambda segment: segment.address)
        for left, right in pairwise(of_device.segments):
            if left.address + left.total_size > right.address:
                raise damaged("segments overlap")
    return dict(sorted(devices.items()))


def _segment(
    entry: dict[Any, Any], where: str, max_blocks: int, has_stack: dict[int, bool]
) -> RecordedSegment:
    blocks = _list(entry.get("blocks"), f"the block list of {where}")
    if len(blocks) > max_blocks:
        raise InvalidSnapshotError(
            f"has more than {MAX_BLOCKS:,} blocks, which is the limit: record a shorter run."
        )
    segment = RecordedSegment(
        address=_integer(entry, "address", where),
        total_size=_integer(entry, "total_size", where, minimum=1),
        stream=_integer(entry, "stream", where, minimum=-LIMIT),
        is_small=entry.get("segment_type") == "small",
        is_expandable=entry.get("is_expandable") is True,
        pool=_pool(entry.get("segment_pool_id", DEFAULT_POOL), where),
        blocks=_blocks(blocks, _integer(entry, "address", where), where, has_stack),
    )
    if entry.get("segment_type") not in ("small", "large"):
        raise damaged(f"{where} is neither small nor large")
    if sum(block.size for block in segment.blocks) != segment.total_size:
        raise damaged(f"the blocks of {where} do not fill it")
    return segment


def _blocks(
    elements: list[Any], address: int, where: str, has_stack: dict[int, bool]
) -> tuple[RecordedBlock, ...]:
    blocks = []
    for number, element in enumerate(elements):
        block = _block(_dict(element, f"block {number} of {where}"), f"block {number} of {where}")
        if block.address != address:
            raise damaged(f"block {number} of {where} does not follow the one before it")
        if block.state != "inactive":
            has_stack[address] = bool(element.get("frames"))
        blocks.append(block)
        address += block.size
    return tuple(blocks)


def _block(entry: dict[Any, Any], where: str) -> RecordedBlock:
    if "address" not in entry:
        raise InvalidSnapshotError(
            "was written by a PyTorch older than 2.1, whose blocks have no address: record one "
            "with 2.1 or newer."
        )
    has_requested = "requested_size" in entry
    return RecordedBlock(
        address=_integer(entry, "address", where),
        size=_integer(entry, "size", where, minimum=1),
        requested_size=_integer(entry, "requested_size", where) if has_requested else None,
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
    settings = _dict(value, "allocator_settings")
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


def _dict(value: object, where: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise damaged(f"{where} is not a dict")
    return value


def _list(value: object, where: str) -> list[Any]:
    if type(value) is not list:
        raise damaged(f"{where} is not a list")
    return value


def _integer(
    entry: dict[Any, Any], key: str, where: str, *, minimum: int = 0, limit: int = LIMIT
) -> int:
    """Return `entry[key]`, which must be an integer from `minimum` to below `limit`."""
    value = entry.get(key)
    if type(value) is not int or not minimum <= value < limit:
        raise damaged(f"{where} has an invalid {key}")
    return value


def _pool(value: object, where: str) -> PoolId:
    if (
        type(value) is tuple
        and len(value) == 2
        and all(type(part) is int and 0 <= part < LIMIT for part in value)
    ):
        return value
    raise damaged(f"{where} has an invalid pool")
