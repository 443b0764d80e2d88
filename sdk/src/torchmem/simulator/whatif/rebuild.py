"""The allocator's memory when a trace began, found by undoing the trace from the final snapshot."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchmem.core.allocator_config import AllocatorConfig
from torchmem.core.sizes import SMALL_BUFFER, SMALL_SIZE
from torchmem.core.snapshot import BlockInfo, SegmentInfo
from torchmem.simulator.recording.trace import Recording
from torchmem.simulator.restore import RangeKey
from torchmem.simulator.whatif.live_blocks import LiveBlock, live_before
from torchmem.simulator.whatif.mapped_pages import first_addresses, mapped_before


@dataclass(frozen=True, slots=True)
class Before:
    """The memory before the first event: segments by address, and where the ranges of expandable ones begin."""

    segments: tuple[SegmentInfo, ...]
    first_addresses: dict[RangeKey, int]


def rebuild(recording: Recording, config: AllocatorConfig) -> Before:
    """Undo the whole trace of a recording that was made under `config`.

    What cannot be known: how much of a gap behind a block of the large pool belongs to the block, when it was freed
    within the trace and the gap is larger than 1 MiB; all of it counts as free then.
    """
    live = live_before(recording, config)
    addresses = sorted(live)
    segments = []
    for key, address, size, is_expandable in _extents(recording, config):
        first = bisect_left(addresses, address)
        inside = addresses[first : bisect_left(addresses, address + size)]
        blocks = _blocks(address, size, {start: live[start] for start in inside}, key[2] == "small", config)
        segments.append(_segment(recording.device, key, list(blocks), is_expandable=is_expandable))
    return Before(tuple(segments), first_addresses(recording, config))


def _extents(recording: Recording, config: AllocatorConfig) -> list[tuple[RangeKey, int, int, bool]]:
    """Key, address, size and kind of every segment, by address."""
    extents: dict[int, tuple[RangeKey, int, int, bool]] = {}
    for segment in recording.segments:
        if not segment.is_expandable:
            key = segment.pool, segment.stream, "small" if segment.is_small else "large"
            extents[segment.address] = key, segment.address, segment.total_size, False
    for event in reversed(recording.events):
        if event.action == "segment_alloc":
            extents.pop(event.address, None)
        elif event.action == "segment_free":
            key = event.pool, event.stream, "small" if event.size == SMALL_BUFFER else "large"
            extents[event.address] = key, event.address, event.size, False
    for key, runs in mapped_before(recording, config).items():
        extents.update({address: (key, address, size, True) for address, size in runs})
    return [extents[address] for address in sorted(extents)]


def _blocks(
    address: int, size: int, live: dict[int, LiveBlock], is_small: bool, config: AllocatorConfig
) -> Iterator[BlockInfo]:
    """The blocks of one segment: those in use with their slack, and what lies between them."""
    end = address + size
    starts = [*live, end]
    if starts[0] > address:
        yield _info(address, starts[0] - address, 0, "inactive")
    for start, following in zip(starts, starts[1:]):  # noqa: B905, RUF007 - the last one has no following
        block = live[start]
        gap = following - start - block.size
        whole = gap <= 0 or _is_slack(gap, block.size, is_small, config)
        state: Literal["active_pending_free", "active_allocated"]
        state = "active_pending_free" if block.pending else "active_allocated"
        yield _info(start, following - start if whole else block.size, block.requested_size, state)
        if not whole:
            yield _info(start + block.size, gap, 0, "inactive")


def _is_slack(gap: int, size: int, is_small: bool, config: AllocatorConfig) -> bool:
    """Whether a gap behind a block in use belongs to it, because so little is not split off (`should_split`)."""
    if is_small or config.expandable_segments:
        return False
    return gap <= SMALL_SIZE or (config.max_split_size is not None and size >= config.max_split_size)


def _info(
    address: int, size: int, requested: int, state: Literal["active_allocated", "active_pending_free", "inactive"]
) -> BlockInfo:
    return {"address": address, "size": size, "requested_size": requested, "state": state}


def _segment(device: int, key: RangeKey, blocks: list[BlockInfo], *, is_expandable: bool) -> SegmentInfo:
    active = [block for block in blocks if block["state"] != "inactive"]
    return {
        "device": device,
        "address": blocks[0]["address"],
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": sum(block["size"] for block in active if block["state"] == "active_allocated"),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": key[1],
        "segment_type": "small" if key[2] == "small" else "large",
        "segment_pool_id": key[0],
        "is_expandable": is_expandable,
        "blocks": blocks,
    }
