"""The allocator's memory when a trace began: the final snapshot with the trace undone.

Expandable segments are tracked in units of 1 MiB, which every page size is a multiple of.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Literal

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIB, SMALL_BUFFER, SMALL_SIZE
from torchmem.allocator.snapshot import BlockInfo, BlockState, SegmentInfo
from torchmem.sample.errors import UsageError
from torchmem.simulator.snapshot import RangeKey
from torchmem.trace.recording import Event, Recording

MAX_UNITS = 1 << 24
"""16 TiB of addresses: PyTorch reserves 9/8 of the GPU's memory for each stream and pool."""
MAX_MOVED_UNITS = 1 << 28
"""256 TiB mapped and unmapped; no trace of ten million events moves more."""
MAPPING_ACTIONS = frozenset({"segment_map", "segment_unmap"})

Owners = dict[int, RangeKey]
"""The address range that each unit belongs to."""


@dataclass(frozen=True, slots=True)
class InitialMemory:
    """The memory before the first event: segments by address, and where address ranges start."""

    segments: tuple[SegmentInfo, ...]
    first_addresses: dict[RangeKey, int]


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block in use, or one that was freed and waits for other streams; sizes in bytes."""

    size: int
    requested_size: int
    pending: bool = False


@dataclass(frozen=True, slots=True)
class _Extent:
    key: RangeKey
    address: int
    size: int
    is_expandable: bool = False


def rebuild(
    recording: Recording, config: AllocatorConfig, slack: Mapping[int, int] = MappingProxyType({})
) -> InitialMemory:
    """Undo the whole trace of a recording that was made under `config`.

    One thing stays unknown unless a capture tells it: if a block of the large pool was freed within
    the trace and the gap behind it is larger than 1 MiB, how much of the gap belonged to the block.
    It is `slack` bytes, by the address of the block, and the rest of the gap counts as free.

    Raises:
        UsageError: the trace allocates or maps memory as no driver and no PyTorch does.
    """
    live = live_before(recording, config)
    for address, block in live.items():
        size = recording.facts.block_sizes.get(address, block.size) + slack.get(address, 0)
        live[address] = replace(block, size=max(block.size, size))
    addresses = sorted(live)
    segments = []
    extents = _extents(recording, config)
    _check_segments(recording, extents)
    for extent in extents:
        first = bisect_left(addresses, extent.address)
        end = bisect_left(addresses, extent.address + extent.size)
        inside = {start: live[start] for start in addresses[first:end]}
        blocks = list(_blocks(extent, inside, config))
        segments.append(_segment(recording.device, extent, blocks))
    return InitialMemory(tuple(segments), first_addresses(recording, config))


def live_before(recording: Recording, config: AllocatorConfig) -> dict[int, LiveBlock]:
    """Return the blocks in use before the first event, by address.

    Of a block that was freed within the trace, only the requested size is known; `config` rounds
    it. What the block had beyond that, because it was not split, follows in `rebuild`.
    """
    live = {
        block.address: LiveBlock(
            block.size, block.requested_size or block.size, block.state != "active_allocated"
        )
        for segment in recording.segments
        for block in segment.blocks
        if block.state != "inactive"
    }
    for event in reversed(recording.events):
        if event.action == "alloc":
            live.pop(event.address, None)
        elif event.action == "free_completed":
            live[event.address] = LiveBlock(config.round_size(event.size), event.size, pending=True)
        elif event.action == "free_requested":
            block = live.get(event.address) or LiveBlock(config.round_size(event.size), event.size)
            live[event.address] = replace(block, pending=False)
    return live


def mapped_before(
    recording: Recording, config: AllocatorConfig
) -> dict[RangeKey, list[tuple[int, int]]]:
    """Return address and size of each contiguous mapped range before the first event."""
    owners = _owners(recording, config)
    mapped: set[int] = set()
    for segment in recording.segments:
        if segment.is_expandable:
            mapped.update(_units(segment.address, segment.total_size))
    for event in reversed(recording.events):
        if event.action == "segment_map":
            mapped.difference_update(_units(event.address, event.size))
        elif event.action == "segment_unmap":
            mapped.update(_units(event.address, event.size))
    units = defaultdict[RangeKey, list[int]](list)
    for unit in sorted(mapped):
        units[owners[unit]].append(unit)
    return {key: list(_contiguous(units[key])) for key in units}


def first_addresses(recording: Recording, config: AllocatorConfig) -> dict[RangeKey, int]:
    """Return the lowest address of each initial range, while it had memory without interruption."""
    owners = _owners(recording, config)
    before = mapped_before(recording, config)
    lowest = {key: ranges[0][0] for key, ranges in before.items()}
    held = {key: sum(size for _, size in ranges) for key, ranges in before.items()}
    for event in recording.events:
        if event.action not in MAPPING_ACTIONS:
            continue
        key = owners[event.address // MIB]
        if held.get(key, 0) <= 0:
            continue
        held[key] += event.size if event.action == "segment_map" else -event.size
        lowest[key] = min(lowest[key], event.address)
    return lowest


def _owners(recording: Recording, config: AllocatorConfig) -> Owners:
    _check_mappings(recording)
    owners: Owners = {}
    for segment in recording.segments:
        if segment.is_expandable:
            key = segment.pool, segment.stream, _kind(is_small=segment.is_small)
            owners.update(dict.fromkeys(_units(segment.address, segment.total_size), key))
    # The size of a mapping tells its pool; that of an unmapped run of pages may not, so it comes
    # second.
    for action in ("segment_map", "segment_unmap"):
        for event in recording.events:
            if event.action == action:
                _claim(owners, event, config)
    return owners


def _check_mappings(recording: Recording) -> None:
    """Raise UsageError for mappings that no PyTorch makes, before they are counted in units."""
    sizes = [event.size for event in recording.events if event.action in MAPPING_ACTIONS]
    sizes += [segment.total_size for segment in recording.segments if segment.is_expandable]
    are_pages = all(0 < size <= MAX_UNITS * MIB and size % MIB == 0 for size in sizes)
    if not are_pages or sum(sizes) > MAX_MOVED_UNITS * MIB:
        raise UsageError(
            f"{recording.name} maps memory in sizes that PyTorch never uses, so it is damaged: "
            "record it again."
        )


def _claim(owners: Owners, event: Event, config: AllocatorConfig) -> None:
    """Assign the units of a mapping to an address range.

    Pages of the small pool are mapped one at a time. Memory that was unmapped, but not mapped
    within the trace, is assigned by a guess.
    """
    units = _units(event.address, event.size)
    known = next((owners[unit] for unit in units if unit in owners), None)
    if event.action == "segment_map":
        is_small = event.size == SMALL_BUFFER
    else:
        is_small = event.size % config.large_segment_size != 0
    key = known or (event.pool, event.stream, _kind(is_small=is_small))
    for unit in units:
        owners.setdefault(unit, key)
    if len(owners) > MAX_UNITS:
        raise UsageError(
            "the trace maps more addresses than any GPU has memory, so it is damaged: "
            "record it again."
        )


def _kind(*, is_small: bool) -> Literal["small", "large"]:
    return "small" if is_small else "large"


def _units(address: int, size: int) -> range:
    first = address // MIB
    return range(first, first + size // MIB)


def _contiguous(units: Iterable[int]) -> Iterator[tuple[int, int]]:
    for _, group in groupby(enumerate(units), lambda pair: pair[1] - pair[0]):
        run = [unit for _, unit in group]
        yield run[0] * MIB, len(run) * MIB


def _extents(recording: Recording, config: AllocatorConfig) -> list[_Extent]:
    """Return every segment before the first event, by address."""
    extents: dict[int, _Extent] = {}
    key: RangeKey
    for segment in recording.segments:
        if not segment.is_expandable:
            key = segment.pool, segment.stream, _kind(is_small=segment.is_small)
            extents[segment.address] = _Extent(key, segment.address, segment.total_size)
    for event in reversed(recording.events):
        if event.action == "segment_alloc":
            extents.pop(event.address, None)
        elif event.action == "segment_free":
            key = event.pool, event.stream, _kind(is_small=event.size == SMALL_BUFFER)
            extents[event.address] = _Extent(key, event.address, event.size)
    for key, ranges in mapped_before(recording, config).items():
        for address, size in ranges:
            extents[address] = _Extent(key, address, size, is_expandable=True)
    return [extents[address] for address in sorted(extents)]


def _check_segments(recording: Recording, extents: list[_Extent]) -> None:
    """Raise UsageError if a segment overlaps another one, or is freed without existing."""
    held = [(extent.address, extent.size) for extent in extents]
    is_sound = all(
        address + size <= following for (address, size), (following, _) in pairwise(held)
    )
    for event in recording.events:
        if event.action not in {"segment_alloc", "segment_free"} or not is_sound:
            continue
        place, segment = bisect_left(held, (event.address, event.size)), (event.address, event.size)
        if event.action == "segment_free":
            is_sound = held[place : place + 1] == [segment]
            del held[place : place + 1]
        else:
            before, behind = held[max(0, place - 1) : place], held[place : place + 1]
            is_sound = all(sum(each) <= event.address for each in before) and all(
                event.address + event.size <= each[0] for each in behind
            )
            held.insert(place, segment)
    if not is_sound:
        raise UsageError(
            f"{recording.name} has segments that overlap, or that end without a start, so it is "
            "damaged: record it again."
        )


def _blocks(
    extent: _Extent, live: dict[int, LiveBlock], config: AllocatorConfig
) -> Iterator[BlockInfo]:
    """Return the blocks of one segment: those in use, with their slack, and the gaps."""
    starts = [*live, extent.address + extent.size]
    if starts[0] > extent.address:
        yield _block(extent.address, starts[0] - extent.address, 0, "inactive")
    for start, following in pairwise(starts):
        block = live[start]
        gap = following - start - block.size
        has_slack = gap <= 0 or _is_slack(gap, block.size, extent.key[2] == "small", config)
        size = following - start if has_slack else block.size
        state: BlockState = "active_pending_free" if block.pending else "active_allocated"
        yield _block(start, size, block.requested_size, state)
        if not has_slack:
            yield _block(start + block.size, gap, 0, "inactive")


def _is_slack(gap: int, size: int, is_small: bool, config: AllocatorConfig) -> bool:
    """Return whether a gap belongs to the block before it, as too small to split off.

    See `torchmem.simulator.blocks.should_split`.
    """
    if is_small or config.expandable_segments:
        return False
    return gap <= SMALL_SIZE or (
        config.max_split_size is not None and size >= config.max_split_size
    )


def _block(address: int, size: int, requested: int, state: BlockState) -> BlockInfo:
    return {"address": address, "size": size, "requested_size": requested, "state": state}


def _segment(device: int, extent: _Extent, blocks: list[BlockInfo]) -> SegmentInfo:
    active = [block for block in blocks if block["state"] != "inactive"]
    allocated = [block for block in active if block["state"] == "active_allocated"]
    pool, stream, kind = extent.key
    return {
        "device": device,
        "address": extent.address,
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": sum(block["size"] for block in allocated),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": stream,
        "segment_type": _kind(is_small=kind == "small"),
        "segment_pool_id": pool,
        "is_expandable": extent.is_expandable,
        "blocks": blocks,
    }
