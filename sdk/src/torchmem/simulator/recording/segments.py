"""The segments of a snapshot, checked: they do not overlap, and their blocks fill them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torchmem.simulator.recording.fields import LIMIT, MAX_DEVICES, a_dict, a_list, a_number, a_pool
from torchmem.simulator.recording.refusal import RefusedError, damaged
from torchmem.simulator.recording.trace import DEFAULT_POOL, RecordedBlock, RecordedSegment

STATES = ("active_allocated", "active_pending_free", "inactive")
_IN_USE = STATES[:2]
MAX_BLOCKS = 1_000_000


@dataclass(frozen=True, slots=True)
class DeviceSegments:
    """Segments of one device by address. `with_stack`: for each block in use whether it carries a stack."""

    segments: list[RecordedSegment]
    with_stack: dict[int, bool]


def check_segments(found: object) -> dict[int, DeviceSegments]:
    """The segments by device; raises RefusedError."""
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
        if any(left.address + left.total_size > right.address for left, right in pairwise(of_device.segments)):
            raise damaged("segments overlap")
    return dict(sorted(devices.items()))


def _segment(entry: dict[Any, Any], where: str, most_blocks: int, with_stack: dict[int, bool]) -> RecordedSegment:
    blocks = a_list(entry.get("blocks"), f"the blocks of {where}")
    if len(blocks) > most_blocks:
        raise RefusedError(f"holds more than {MAX_BLOCKS:,} blocks, more than can be replayed: record a shorter run.")
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


def _blocks(found: list[Any], address: int, where: str, with_stack: dict[int, bool]) -> tuple[RecordedBlock, ...]:
    blocks = []
    for number, block in enumerate(found):
        place = f"block {number} of {where}"
        entry = a_dict(block, place)
        if "address" not in entry:
            raise RefusedError(
                "was written by a PyTorch older than 2.1, whose blocks have no address: record one with 2.1 or newer."
            )
        if a_number(entry, "address", place) != address:
            raise damaged(f"{place} does not follow the one before it")
        requested = a_number(entry, "requested_size", place) if "requested_size" in entry else None
        checked = RecordedBlock(address, a_number(entry, "size", place, least=1), requested, _state(entry, place))
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
