"""Which blocks were in use when a trace began: the final snapshot, undone event by event from the end.

Expandable segments when a trace began: the final ones, without what was mapped since and with what was unmapped.

Everything is counted in steps of 1 MiB, of which each page is a multiple.

The allocator's memory when a trace began, found by undoing the trace from the final snapshot.

What is known of the run that a recording was made of.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIB, SMALL_BUFFER, SMALL_SIZE
from torchmem.allocator.snapshot import BlockInfo, SegmentInfo
from torchmem.recording.recording import Event, Recording
from torchmem.sample.errors import UsageError
from torchmem.simulator.snapshot import RangeKey


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block in use, or one that was freed and waits for other streams; sizes in bytes."""

    size: int
    requested_size: int
    pending: bool = False


def live_before(recording: Recording, config: AllocatorConfig) -> dict[int, LiveBlock]:
    """The blocks in use before the first event, by address.

    Of a block that was freed within the trace only the requested size is known, and `config` rounds it. What it has
    on top of that because it was not split comes to light in `segments_before`.
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


Steps = dict[int, RangeKey]
"""Which address range each step belongs to."""
MOST_STEPS = 1 << 24
"""16 TiB of addresses: PyTorch reserves an eighth more than the card for each stream and pool."""
MOST_MOVED = 1 << 28
"""256 TiB mapped and unmapped; a trace of ten million events that says more is no trace."""


def mapped_before(
    recording: Recording, config: AllocatorConfig
) -> dict[RangeKey, list[tuple[int, int]]]:
    """Address and size of each contiguous range that had memory before the first event, by address."""
    owners = _owners(recording, config)
    mapped = {step for segment in recording.segments if segment.is_expandable
              for step in _steps(segment.address, segment.total_size)}  # fmt: skip
    for event in reversed(recording.events):
        if event.action == "segment_map":
            mapped.difference_update(_steps(event.address, event.size))
        elif event.action == "segment_unmap":
            mapped.update(_steps(event.address, event.size))
    steps = defaultdict[RangeKey, list[int]](list)
    for step in sorted(mapped):
        steps[owners[step]].append(step)
    return {key: list(_contiguous(steps[key])) for key in steps}


def first_addresses(recording: Recording, config: AllocatorConfig) -> dict[RangeKey, int]:
    """The lowest address that each range was mapped at, as long as it had memory without a break."""
    owners = _owners(recording, config)
    before = mapped_before(recording, config)
    lowest = {key: runs[0][0] for key, runs in before.items()}
    held = {key: sum(size for _, size in runs) for key, runs in before.items()}
    for event in recording.events:
        if event.action not in {"segment_map", "segment_unmap"}:
            continue
        key = owners[event.address // MIB]
        if held.get(key, 0) <= 0:
            continue
        held[key] += event.size if event.action == "segment_map" else -event.size
        lowest[key] = min(lowest[key], event.address)
    return lowest


def _owners(recording: Recording, config: AllocatorConfig) -> Steps:
    _check(recording)
    owners: Steps = {}
    for segment in recording.segments:
        if segment.is_expandable:
            key = segment.pool, segment.stream, _kind(is_small=segment.is_small)
            owners.update(dict.fromkeys(_steps(segment.address, segment.total_size), key))
    for action in ("segment_map", "segment_unmap"):
        for event in recording.events:
            if event.action == action:
                _claim(owners, event, config)
    return owners


def _check(recording: Recording) -> None:
    """Raises UsageError for pages that no PyTorch maps, before anything is counted in steps."""
    moved = [
        event.size for event in recording.events if event.action in {"segment_map", "segment_unmap"}
    ]
    sizes = [
        *moved,
        *(segment.total_size for segment in recording.segments if segment.is_expandable),
    ]
    whole = all(0 < size <= MOST_STEPS * MIB and size % MIB == 0 for size in sizes)
    if not whole or sum(sizes) > MOST_MOVED * MIB:
        raise UsageError(
            f"{recording.name} maps memory in pieces that PyTorch never does, so it is damaged: record it again."
        )


def _claim(owners: Steps, event: Event, config: AllocatorConfig) -> None:
    """A page of the small pool is mapped alone; what is unmapped without being seen mapped must be guessed."""
    steps = _steps(event.address, event.size)
    known = next((owners[step] for step in steps if step in owners), None)
    is_small = (
        event.size == SMALL_BUFFER
        if event.action == "segment_map"
        else event.size % config.large_segment_size
    )
    key = known or (event.pool, event.stream, _kind(is_small=bool(is_small)))
    for step in steps:
        owners.setdefault(step, key)
    if len(owners) > MOST_STEPS:
        raise UsageError(
            "The trace maps more addresses than any GPU has memory, so it is damaged: record it again."
        )


def _kind(*, is_small: bool) -> Literal["small", "large"]:
    return "small" if is_small else "large"


def _steps(address: int, size: int) -> range:
    first = address // MIB
    return range(first, first + size // MIB)


def _contiguous(steps: Iterable[int]) -> Iterator[tuple[int, int]]:
    for _, run in groupby(enumerate(steps), lambda pair: pair[1] - pair[0]):
        found = [step for _, step in run]
        yield found[0] * MIB, len(found) * MIB


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
        blocks = _blocks(
            address, size, {start: live[start] for start in inside}, key[2] == "small", config
        )
        segments.append(_segment(recording.device, key, list(blocks), is_expandable=is_expandable))
    return Before(tuple(segments), first_addresses(recording, config))


def _extents(
    recording: Recording, config: AllocatorConfig
) -> list[tuple[RangeKey, int, int, bool]]:
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
    return gap <= SMALL_SIZE or (
        config.max_split_size is not None and size >= config.max_split_size
    )


def _info(
    address: int,
    size: int,
    requested: int,
    state: Literal["active_allocated", "active_pending_free", "inactive"],
) -> BlockInfo:
    return {"address": address, "size": size, "requested_size": requested, "state": state}


def _segment(
    device: int, key: RangeKey, blocks: list[BlockInfo], *, is_expandable: bool
) -> SegmentInfo:
    active = [block for block in blocks if block["state"] != "inactive"]
    return {
        "device": device,
        "address": blocks[0]["address"],
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": sum(
            block["size"] for block in active if block["state"] == "active_allocated"
        ),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": key[1],
        "segment_type": "small" if key[2] == "small" else "large",
        "segment_pool_id": key[0],
        "is_expandable": is_expandable,
        "blocks": blocks,
    }


@dataclass(frozen=True, slots=True)
class Case:
    """A recording, the settings it was made under and the memory before it.

    `card_bytes`: what the allocator could get, `total_bytes`: all memory of the card; None where nobody knows.
    """

    recording: Recording
    config: AllocatorConfig
    before: Before
    card_bytes: int | None
    total_bytes: int | None
