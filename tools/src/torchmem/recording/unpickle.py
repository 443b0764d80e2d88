"""Why a file is no recording: the end of a sentence that begins with the file's name.

Fields of an unpickled snapshot: each has exactly the type that PyTorch writes, and numbers are within 63 bits.

The trace of one device, checked entry by entry and kept as columns; stacks are dropped.

The segments of a snapshot, checked: they do not overlap, and their blocks fill them.

The content of an unpickled snapshot, checked and reduced to what a replay needs.

Shape: `THCPModule_memorySnapshot` in torch/csrc/cuda/Module.cpp, PyTorch 2.1 to 2.13.

Unpickling with distrust: builtins only, and every way to fail is one sentence.

The process that opens the pickle: it may use so much memory and time, holds no secrets, and answers in columns.

Answer on its stdout: one line of JSON (what was refused, or everything but the events), then the arrays of the events.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import sys
from array import array
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from typing import Any, BinaryIO

from torchmem.recording.recording import DEFAULT_POOL, PoolId, RecordedBlock, RecordedSegment

HOW_TO_RECORD = (
    "call torch.cuda.memory._record_memory_history(max_entries=1_000_000) before training and "
    "torch.cuda.memory._dump_snapshot(FILE) after some steps, or run `torchmem capture --rank N`"
)


class InvalidSnapshotError(Exception):
    """A snapshot that cannot be used; its text says why, and what to do."""


def damaged(what: str) -> InvalidSnapshotError:
    """The snapshot contradicts what every supported version of PyTorch writes."""
    return InvalidSnapshotError(
        f"is not a snapshot as PyTorch 2.1 and newer write it ({what}): record one again with an unchanged file from "
        "torch.cuda.memory._dump_snapshot."
    )


LIMIT = 1 << 63
MAX_DEVICES = 128  # C10_COMPILE_TIME_MAX_GPUS is 120


def a_dict(found: object, where: str) -> dict[Any, Any]:
    """`found`; raises InvalidSnapshotError unless it is a dict."""
    if type(found) is not dict:
        raise damaged(f"{where} is no dict")
    return found


def a_list(found: object, where: str) -> list[Any]:
    """`found`; raises InvalidSnapshotError unless it is a list."""
    if type(found) is not list:
        raise damaged(f"{where} is no list")
    return found


def a_number(
    entry: dict[Any, Any], key: str, where: str, *, least: int = 0, most: int = LIMIT
) -> int:
    """The integer `entry[key]`; raises InvalidSnapshotError unless it is in [least, most)."""
    found = entry.get(key)
    if type(found) is not int or not least <= found < most:
        raise damaged(f"{where} has a wrong {key}")
    return found


def a_pool(found: object, where: str) -> PoolId:
    """A pool's identity; raises InvalidSnapshotError unless it is a pair of integers."""
    if (
        type(found) is tuple
        and len(found) == 2
        and all(type(part) is int and 0 <= part < LIMIT for part in found)
    ):
        return found
    raise damaged(f"{where} has a wrong pool")


ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot",
)  # fmt: skip
_CODES = {action: code for code, action in enumerate(ACTIONS)}
_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED = (
    _CODES["alloc"],
    _CODES["free_requested"],
    _CODES["free_completed"],
)
_OOM, _SNAPSHOT = _CODES["oom"], _CODES["snapshot"]


@dataclass(slots=True)
class Columns:
    """One array for each field of the events. `codes`: into ACTIONS. `pools`: into `pool_ids`, -1 for none."""

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
        """Those with one element for each event."""
        return self.codes, self.addresses, self.sizes, self.streams, self.pools

    def has_allocations(self) -> bool:
        """Whether memory was allocated at all."""
        return _ALLOC in self.codes


def check_trace(trace: list[Any], device: int, with_stack: Mapping[int, bool]) -> Columns:
    """The columns of a trace, oldest event first; raises InvalidSnapshotError. `with_stack`: see `DeviceSegments`."""
    columns = Columns()
    live: set[int] = set()
    unmatched = False
    for number, found in enumerate(trace):
        entry = a_dict(found, f"event {number} of device {device}")
        action = entry.get("action")
        code = _CODES.get(action) if type(action) is str else None
        if code is None:
            _check_harmless(entry, device, number)
            columns.ignored += 1
            continue
        _append(columns, code, entry, device, number)
        if code == _ALLOC:
            live.add(entry["addr"])
        elif code == _FREE_COMPLETED:
            unmatched |= entry["addr"] not in live
            live.discard(entry["addr"])
    _check_frees(columns)
    columns.truncated = _truncated(with_stack, live, unmatched=unmatched)
    return columns


def _append(columns: Columns, code: int, entry: dict[Any, Any], device: int, number: int) -> None:
    """Written for speed: a long trace has millions of entries."""
    size, stream, address, pool = (
        entry.get("size"),
        entry.get("stream", 0),
        entry.get("addr"),
        entry.get("pool_id"),
    )
    if code == _OOM:
        free = a_number(entry, "device_free", f"event {number} of device {device}")
        columns.device_free[len(columns.codes)] = free
        address = 0
    elif code == _SNAPSHOT:
        address = 0
    if (
        type(size) is not int or type(stream) is not int or type(address) is not int
        or not (code == _SNAPSHOT or size > 0) or not 0 <= size < LIMIT
        or not 0 <= address < LIMIT - size or not -LIMIT <= stream < LIMIT
    ):  # fmt: skip
        raise damaged(f"event {number} of device {device} has a wrong size, address or stream")
    columns.codes.append(code)
    columns.addresses.append(address)
    columns.sizes.append(size)
    columns.streams.append(stream)
    columns.pools.append(-1 if pool is None else _pool_index(columns, pool, number))


def _pool_index(columns: Columns, pool: object, number: int) -> int:
    return columns.pool_ids.setdefault(a_pool(pool, f"event {number}"), len(columns.pool_ids))


def _check_harmless(entry: dict[Any, Any], device: int, number: int) -> None:
    """An action that this version does not know may be passed over only where it names no memory."""
    if entry.get("addr") or entry.get("size"):
        raise InvalidSnapshotError(
            f"holds an action that this torchmem does not know ({str(entry.get('action'))[:40]!r}, event {number} of "
            f"device {device}), from a newer PyTorch: run pip install --upgrade torchmem."
        )


def _check_frees(columns: Columns) -> None:
    if columns.codes.count(_FREE_REQUESTED) and not columns.codes.count(_FREE_COMPLETED):
        raise InvalidSnapshotError(
            "holds no free_completed events, so nobody can tell when memory was free again: record it without "
            "skip_actions."
        )


def _truncated(with_stack: Mapping[int, bool], live: set[int], *, unmatched: bool) -> bool | None:
    """See `Recording.truncated`."""
    missing = [has_stack for address, has_stack in with_stack.items() if address not in live]
    if any(missing):
        return True
    return None if missing or unmatched else False


STATES = ("active_allocated", "active_pending_free", "inactive")
_IN_USE = STATES[:2]
MAX_BLOCKS = 1_000_000


@dataclass(frozen=True, slots=True)
class DeviceSegments:
    """Segments of one device by address. `with_stack`: for each block in use whether it carries a stack."""

    segments: list[RecordedSegment]
    with_stack: dict[int, bool]


def check_segments(found: object) -> dict[int, DeviceSegments]:
    """The segments by device; raises InvalidSnapshotError."""
    devices: dict[int, DeviceSegments] = {}
    left = MAX_BLOCKS
    for number, segment in enumerate(a_list(found, "segments")):
        where = f"segment {number}"
        entry = a_dict(segment, where)
        device = a_number(entry, "device", where, most=MAX_DEVICES)
        of_device = devices.setdefault(device, DeviceSegments([], {}))
        checked = _segment(entry, where, left, of_device.with_stack)
        left -= len(checked.blocks)
        of_device.segments.append(checked)
    for of_device in devices.values():
        of_device.segments.sort(key=lambda segment: segment.address)
        if any(
            left.address + left.total_size > right.address
            for left, right in pairwise(of_device.segments)
        ):
            raise damaged("segments overlap")
    return dict(sorted(devices.items()))


def _segment(
    entry: dict[Any, Any], where: str, most_blocks: int, with_stack: dict[int, bool]
) -> RecordedSegment:
    blocks = a_list(entry.get("blocks"), f"the blocks of {where}")
    if len(blocks) > most_blocks:
        raise InvalidSnapshotError(
            f"holds more than {MAX_BLOCKS:,} blocks, more than can be replayed: record a shorter run."
        )
    segment = RecordedSegment(
        address=a_number(entry, "address", where),
        total_size=a_number(entry, "total_size", where, least=1),
        stream=a_number(entry, "stream", where, least=-LIMIT),
        is_small=entry.get("segment_type") == "small",
        is_expandable=entry.get("is_expandable") is True,
        pool=a_pool(entry.get("segment_pool_id", DEFAULT_POOL), where),
        blocks=_blocks(blocks, a_number(entry, "address", where), where, with_stack),
    )
    if entry.get("segment_type") not in ("small", "large"):
        raise damaged(f"{where} is neither small nor large")
    if sum(block.size for block in segment.blocks) != segment.total_size:
        raise damaged(f"the blocks of {where} do not fill it")
    return segment


def _blocks(
    found: list[Any], address: int, where: str, with_stack: dict[int, bool]
) -> tuple[RecordedBlock, ...]:
    blocks = []
    for number, block in enumerate(found):
        place = f"block {number} of {where}"
        entry = a_dict(block, place)
        if "address" not in entry:
            raise InvalidSnapshotError(
                "was written by a PyTorch older than 2.1, whose blocks have no address: record one with 2.1 or newer."
            )
        if a_number(entry, "address", place) != address:
            raise damaged(f"{place} does not follow the one before it")
        requested = a_number(entry, "requested_size", place) if "requested_size" in entry else None
        checked = RecordedBlock(
            address, a_number(entry, "size", place, least=1), requested, _state(entry, place)
        )
        if checked.state in _IN_USE:
            with_stack[address] = bool(entry.get("frames"))
        blocks.append(checked)
        address += checked.size
    return tuple(blocks)


def _state(entry: dict[Any, Any], where: str) -> str:
    """The docstring of `torch.cuda.memory._snapshot` calls the second state active_awaiting_free; C++ does not."""
    state = entry.get("state")
    state = "active_pending_free" if state == "active_awaiting_free" else state
    if type(state) is not str or state not in STATES:
        raise damaged(f"{where} has an unknown state")
    return state


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
    """The content of a snapshot that was read from so many bytes; raises InvalidSnapshotError."""
    if type(snapshot) is list:
        raise InvalidSnapshotError(
            "holds segments without the trace of allocations, as torch.cuda.memory_snapshot() and older versions give "
            f"them: to record one, {HOW_TO_RECORD}."
        )
    if type(snapshot) is not dict or not {"segments", "device_traces"} <= snapshot.keys():
        raise damaged("it has no segments and device_traces")
    devices = check_segments(snapshot["segments"])
    traces = _unchecked_traces(a_list(snapshot["device_traces"], "device_traces"), file_bytes)
    if not traces:
        raise InvalidSnapshotError(_no_trace(has_segments=bool(devices)))
    segments = {device: found.segments for device, found in devices.items()}
    return Content(
        _with_allocations(traces, devices),
        segments,
        _settings(snapshot.get("allocator_settings", {})),
    )


def _unchecked_traces(found: list[object], file_bytes: int) -> dict[int, list[object]]:
    """Those that are not empty, by device; few enough events to look at each."""
    if len(found) > MAX_DEVICES:
        raise damaged("it has more devices than PyTorch knows")
    traces = {
        device: a_list(trace, f"the trace of device {device}")
        for device, trace in enumerate(found)
        if trace
    }
    events = sum(map(len, traces.values()))
    if events > MAX_EVENTS:
        raise InvalidSnapshotError(
            f"holds more than {MAX_EVENTS:,} events, more than can be replayed: record fewer steps, or with "
            "_record_memory_history(max_entries=1_000_000)."
        )
    if events * MIN_EVENT_BYTES > file_bytes:
        raise damaged("it repeats events instead of writing each")
    return traces


def _with_allocations(
    traces: Mapping[int, list[object]], devices: Mapping[int, DeviceSegments]
) -> dict[int, Columns]:
    none = DeviceSegments([], {})
    columns = {
        device: check_trace(trace, device, devices.get(device, none).with_stack)
        for device, trace in traces.items()
    }
    found = {device: trace for device, trace in columns.items() if trace.has_allocations()}
    if not found:
        raise InvalidSnapshotError(
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
        name: value
        for name, value in settings.items()
        if _is_name(name) and (_is_scalar(value) or _is_table(value))
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
    return type(value) in {bool, float} or (
        type(value) is str and len(value) <= MAX_SETTING_CHARACTERS
    )


_FOREIGN = {
    b"\x1f\x8b": "is compressed: unpack it first with gunzip.",
    b"PK": "is a zip archive, as torch.save writes it, not a memory snapshot: write it with _dump_snapshot(FILE).",
}

_ENDS_EARLY = (
    "ends too early: it was not written or copied completely; copy it again or record another."
)


class _BuiltinsOnly(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Refuse every class and function, so that no code of the file runs."""
        raise InvalidSnapshotError(
            f"refers to code ({module_name[:80]}.{global_name[:80]}), which no memory snapshot does: do not open it "
            "with anything else, and record a snapshot of your own."
        )


def load(file: BinaryIO) -> object:
    """The value that the file holds, made of builtins; raises InvalidSnapshotError, and MemoryError when it is too large."""
    _look_at_beginning(file)
    try:
        value: object = _BuiltinsOnly(file).load()
    except (InvalidSnapshotError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - an unpickler raises whatever the bytes make it raise
        if isinstance(error, EOFError) or "truncated" in str(error):
            raise InvalidSnapshotError(_ENDS_EARLY) from None
        raise _not_a_snapshot() from None
    return value


def _look_at_beginning(file: BinaryIO) -> None:
    beginning = file.read(2)
    file.seek(0)
    if not beginning:
        raise InvalidSnapshotError(f"is empty; to record a snapshot, {HOW_TO_RECORD}.")
    if beginning in _FOREIGN:
        raise InvalidSnapshotError(_FOREIGN[beginning])
    if beginning[:1] != b"\x80":  # every pickle since protocol 2 begins so
        raise _not_a_snapshot()


def _not_a_snapshot() -> InvalidSnapshotError:
    return InvalidSnapshotError(
        f"is not a memory snapshot of PyTorch; to record one, {HOW_TO_RECORD}."
    )


# A byte of a snapshot becomes about 4 bytes of Python objects with stacks, up to 9 without.
BASE_BYTES, BYTES_PER_BYTE = 512 << 20, 12
# It reads about 30 MB a second; a slow or busy machine gets thirty times as long.
BASE_SECONDS, BYTES_PER_SECOND = 20, 1 << 20


def main() -> None:
    """Read the snapshot from stdin and answer on stdout."""
    size = os.fstat(0).st_size
    limit(resource.RLIMIT_AS, BASE_BYTES + BYTES_PER_BYTE * size)
    limit(resource.RLIMIT_CPU, BASE_SECONDS + size // BYTES_PER_SECOND)
    limit(resource.RLIMIT_CORE, 0)
    gc.disable()  # it would walk through millions of dicts again and again
    header: dict[str, Any]
    traces: Mapping[int, Columns] = {}
    try:
        content = check(load(sys.stdin.buffer), size)
        header, traces = _header(content), content.traces
    except InvalidSnapshotError as error:
        header = {"refused": str(error)}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    for columns in traces.values():
        for column in columns.arrays():
            column.tofile(sys.stdout.buffer)
    sys.stdout.buffer.flush()
    os._exit(0)  # without freeing millions of objects one by one


def limit(kind: int, most: int) -> None:
    """Lower one limit of this process, unless it is lower already."""
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _header(content: Content) -> dict[str, Any]:
    return {
        "settings": content.settings,
        "segments": [
            [device, list(map(astuple, segments))] for device, segments in content.segments.items()
        ],
        "traces": [
            {
                "device": device,
                "events": len(columns.codes),
                "device_free": list(columns.device_free.items()),
                "pools": list(columns.pool_ids),
                "ignored": columns.ignored,
                "truncated": columns.truncated,
            }
            for device, columns in content.traces.items()
        ],
    }
