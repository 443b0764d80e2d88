"""The entries of a trace, reduced to columns while the snapshot is still being unpickled.

An entry is a dict of some 400 bytes with a list of frames of its own. What has been read of it is
forgotten at once, so that a trace needs less than its file.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmem.allocator.snapshot import PoolId
from torchmem.trace.checked_values import (
    LIMIT,
    InvalidSnapshotError,
    checked_dict,
    checked_integer,
    checked_pool,
    damaged,
)
from torchmem.trace.stacks import NO_STACK, UNKNOWN_TIME, EventStacks, StackTable

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
_CODES = {action: code for code, action in enumerate(ACTIONS)}
ALLOC = _CODES["alloc"]
FREE_REQUESTED, FREE_COMPLETED = _CODES["free_requested"], _CODES["free_completed"]
OOM, _SNAPSHOT = _CODES["oom"], _CODES["snapshot"]
_WITH_STACK = {ALLOC, OOM}
_FREES = {FREE_REQUESTED, FREE_COMPLETED}
# PyTorch's `compile_context` (2.8 and newer) outside of torch.compile.
NOT_COMPILED = "N/A"


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
        return ALLOC in self.codes


class TraceReader:
    """Reads the trace of one device, each entry once, the oldest first.

    An entry that was read is removed from the list and emptied, and so is its list of frames: the
    unpickler keeps every object that it has made, because a later one may refer to it.
    """

    def __init__(self, table: StackTable) -> None:
        self.columns = EventColumns()
        self.stacks = EventStacks()
        self._table = table
        self._done = 0
        self._live: set[int] = set()
        self._unmatched = False

    def take(self, trace: list[Any], device: int | None = None) -> None:
        """Read the entries that follow those already read. Raise InvalidSnapshotError.

        An entry that cannot be used stays unread. `device` is None while it is unknown.
        """
        where = "a device" if device is None else f"device {device}"
        for number in range(self._done, len(trace)):
            entry = checked_dict(trace[number], f"event {number} of {where}")
            if not entry:
                raise damaged("it refers to the same events many times")
            self._read(entry, number, where)
            entry.clear()
            trace[number] = None
            self._done = number + 1

    def finish(self, stacks: Mapping[int, int]) -> EventColumns:
        """Return the columns of the whole trace.

        `stacks` has the stack of each block in use by its address.
        """
        codes = self.columns.codes
        if codes.count(FREE_REQUESTED) and not codes.count(FREE_COMPLETED):
            raise InvalidSnapshotError(
                "has no free_completed events, so it is unknown when memory was free again: record "
                "without skip_actions."
            )
        # A block with a stack was allocated while the history was on: its entry has been
        # overwritten. One without, or a free without an allocation, may also be from before the
        # recording.
        missing = [stack for address, stack in stacks.items() if address not in self._live]
        if any(stack != NO_STACK for stack in missing):
            self.columns.truncated = True
        else:
            self.columns.truncated = None if missing or self._unmatched else False
        return self.columns

    def _read(self, entry: dict[Any, Any], number: int, where: str) -> None:
        action = entry.get("action")
        code = _CODES.get(action) if type(action) is str else None
        if code is None:
            _check_ignorable(entry, number, where)
            self.columns.ignored += 1
            return
        time = entry.get("time_us", UNKNOWN_TIME)
        if type(time) is not int or not UNKNOWN_TIME <= time < LIMIT:
            raise damaged("an event has an invalid time_us")
        stack = self._stack(code, entry)
        self._append(code, entry, number, where)
        self._label(code, entry)
        self.stacks.numbers.append(stack)
        self.stacks.times.append(time)
        if code == ALLOC:
            self._live.add(entry["addr"])
        elif code == FREE_COMPLETED:
            self._unmatched |= entry["addr"] not in self._live
            self._live.discard(entry["addr"])

    def _stack(self, code: int, entry: dict[Any, Any]) -> int:
        """Return the stack of an allocation; that of a free shows not what the memory was for."""
        frames = entry.get("frames")
        if code in _WITH_STACK:
            return self._table.number(frames, entry.get("forward_frames"))
        if code in _FREES:
            self._table.forget(frames)
        return NO_STACK

    def _label(self, code: int, entry: dict[Any, Any]) -> None:
        """Append what the program and torch.compile wrote on an allocation."""
        metadata = region = NO_STACK
        if code == ALLOC:
            metadata = self._table.text(entry.get("user_metadata"))
            region = self._table.text(entry.get("compile_context"), absent=NOT_COMPILED)
        self.stacks.metadata.append(metadata)
        self.stacks.regions.append(region)

    def _append(self, code: int, entry: dict[Any, Any], number: int, where: str) -> None:
        """Append one event; written for speed, because a long trace has millions of them."""
        columns = self.columns
        size, stream = entry.get("size"), entry.get("stream", 0)
        address, pool = entry.get("addr"), entry.get("pool_id")
        if code == OOM:
            free = checked_integer(entry, "device_free", f"event {number} of {where}")
            columns.device_free[len(columns.codes)] = free
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
            raise damaged(f"event {number} of {where} has an invalid size, address or stream")
        index = -1 if pool is None else self._pool_index(pool, number)
        columns.codes.append(code)
        columns.addresses.append(address)
        columns.sizes.append(size)
        columns.streams.append(stream)
        columns.pools.append(index)

    def _pool_index(self, pool: object, number: int) -> int:
        known = self.columns.pool_ids
        return known.setdefault(checked_pool(pool, f"event {number}"), len(known))


def is_trace(value: list[Any]) -> bool:
    """Return whether a list begins with an entry of a trace."""
    return type(value[0]) is dict and "action" in value[0]


def _check_ignorable(entry: dict[Any, Any], number: int, where: str) -> None:
    """Raise InvalidSnapshotError if an event with an unknown action affects memory."""
    if entry.get("addr") or entry.get("size"):
        action = str(entry.get("action"))[:40]
        raise InvalidSnapshotError(
            f"has an action that this version of torchmem does not know ({action!r}, event "
            f"{number} of {where}): it is from a newer PyTorch. Run pip install --upgrade "
            "torchmem."
        )
