"""The trace of one device, checked entry by entry and kept as columns; stacks are dropped."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmem.simulator.recording.fields import LIMIT, a_dict, a_number, a_pool
from torchmem.simulator.recording.refusal import RefusedError, damaged
from torchmem.simulator.recording.trace import PoolId

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot",
)  # fmt: skip
_CODES = {action: code for code, action in enumerate(ACTIONS)}
_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED = _CODES["alloc"], _CODES["free_requested"], _CODES["free_completed"]
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
    """The columns of a trace, oldest event first; raises RefusedError. `with_stack`: see `DeviceSegments`."""
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
    size, stream, address, pool = entry.get("size"), entry.get("stream", 0), entry.get("addr"), entry.get("pool_id")
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
        raise RefusedError(
            f"holds an action that this torchmem does not know ({str(entry.get('action'))[:40]!r}, event {number} of "
            f"device {device}), from a newer PyTorch: run pip install --upgrade torchmem."
        )


def _check_frees(columns: Columns) -> None:
    if columns.codes.count(_FREE_REQUESTED) and not columns.codes.count(_FREE_COMPLETED):
        raise RefusedError(
            "holds no free_completed events, so nobody can tell when memory was free again: record it without "
            "skip_actions."
        )


def _truncated(with_stack: Mapping[int, bool], live: set[int], *, unmatched: bool) -> bool | None:
    """See `Recording.truncated`."""
    missing = [has_stack for address, has_stack in with_stack.items() if address not in live]
    if any(missing):
        return True
    return None if missing or unmatched else False
