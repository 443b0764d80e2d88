"""Reduce a memory snapshot to a map of bounded size.

Beyond the bound, small neighbors are drawn as one block of each state, which keeps the bytes of
every state. They are smaller than a page of an expandable segment, so none of the free ones could
be returned to the driver, and that can still be seen in the map.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import itemgetter

from torchmem.allocator.backend import Device
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import SMALL_BUFFER
from torchmem.allocator.snapshot import BlockState, SegmentInfo
from torchmem.sample.memory_map import MAX_BLOCKS, DeviceMap, SegmentMap
from torchmem.sample.sample import Layout

_LETTERS: dict[BlockState, str] = {
    "active_allocated": "a",
    "active_pending_free": "p",
    "inactive": "f",
}
# Blocks below such a size are merged, the smallest first; the last is a page of the small pool.
_MERGED_BELOW = (4 << 10, 64 << 10, 512 << 10, SMALL_BUFFER)
# A group of merged blocks is at most this many times larger, so that little moves.
_GROUP = 16

_size, _state, _address = itemgetter("size"), itemgetter("state"), itemgetter("address")


def device_map(
    segments: Iterable[SegmentInfo],
    device: Device,
    layout: Layout,
    config: AllocatorConfig,
    max_blocks: int = MAX_BLOCKS,
) -> DeviceMap:
    """Return the map of one device, by address, with at most `max_blocks` blocks.

    Args:
        segments: the whole snapshot.
        device: the device to map.
        layout: what was measured in the same snapshot.
        config: allocator settings in effect.
        max_blocks: the largest number of blocks.
    """
    own = [segment for segment in segments if segment["device"] == device.index]
    found = [_segment_map(segment) for segment in sorted(own, key=_address)]
    mapped = DeviceMap(
        device.index, device.uuid, device.total_bytes, config.large_segment_size, layout, found
    )
    return thinned(mapped, max_blocks)


def thinned(mapped: DeviceMap, max_blocks: int) -> DeviceMap:
    """Return a map with at most `max_blocks` blocks, small neighbors drawn as one."""
    found = mapped.segments
    count = _count(found)
    if count <= max_blocks:
        return mapped
    for below in _MERGED_BELOW:
        # Between two larger blocks, a merged one may remain.
        larger = sum(size >= below for segment in found for size in segment.sizes)
        if larger > max_blocks // 2 and below != _MERGED_BELOW[-1]:
            continue
        merged = [_merged(segment, below) for segment in found]
        left = _count(merged)
        if left <= max_blocks:
            break
    lost = mapped.merged_blocks + count - left
    return _cut(replace(mapped, segments=merged, merged_blocks=lost), max_blocks)


def _count(segments: Iterable[SegmentMap]) -> int:
    return sum(len(segment.sizes) for segment in segments)


def _segment_map(segment: SegmentInfo) -> SegmentMap:
    blocks = segment["blocks"]
    return SegmentMap(
        segment["address"],
        segment["segment_type"],
        segment["stream"],
        segment["segment_pool_id"],
        segment["is_expandable"],
        list(map(_size, blocks)),
        "".join(map(_LETTERS.__getitem__, map(_state, blocks))),
    )


def _merged(segment: SegmentMap, below: int) -> SegmentMap:
    """Return the segment with one block of each state for each group of blocks below a size."""
    sizes, states = list[int](), list[str]()
    group, total = dict[str, tuple[int, int]](), 0
    for size, state in zip(segment.sizes, segment.states, strict=True):
        if size >= below or total + size > below * _GROUP:
            _add_group(sizes, states, group)
            group, total = {}, 0
        if size >= below:
            sizes.append(size)
            states.append(state)
        else:
            members, taken = group.get(state, (0, 0))
            group[state] = members + 1, taken + size
            total += size
    _add_group(sizes, states, group)
    return replace(segment, sizes=sizes, states="".join(states))


def _add_group(sizes: list[int], states: list[str], group: dict[str, tuple[int, int]]) -> None:
    for state, (members, size) in group.items():
        sizes.append(size)
        states.append(state.upper() if members > 1 else state)


def _cut(mapped: DeviceMap, max_blocks: int) -> DeviceMap:
    """Leave the smallest segments out where merging did not suffice."""
    kept, left, omitted = list[SegmentMap](), max_blocks, 0
    for segment in sorted(mapped.segments, key=lambda segment: -sum(segment.sizes)):
        if len(segment.sizes) <= left:
            kept.append(segment)
            left -= len(segment.sizes)
        else:
            omitted += sum(segment.sizes)
    kept.sort(key=lambda segment: segment.address)
    return replace(mapped, segments=kept, omitted_bytes=mapped.omitted_bytes + omitted)
