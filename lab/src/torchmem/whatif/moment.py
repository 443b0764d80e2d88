"""The allocator's memory at one moment of a snapshot, and why a request failed there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.oom_cause import OomEvidence, largest_free_blocks
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import DEFAULT_POOL, SegmentInfo
from torchmem.explain.verdict import Circumstances, judge
from torchmem.sample.errors import UsageError
from torchmem.sample.sample import OomCause, OomDetail
from torchmem.trace.holders import HolderLine, LineFinder
from torchmem.trace.lifetimes import BEFORE, Lifetimes
from torchmem.whatif.initial_memory import rebuild
from torchmem.whatif.settings import recorded_settings

MAX_UNDONE = 1_000_000
"""Events after the moment; more take more than a few seconds to undo."""


@dataclass(frozen=True, slots=True)
class StrandedLine:
    """Free bytes beside the blocks of one line; `gaps` is the number of free blocks."""

    line: HolderLine
    size_bytes: int
    gaps: int


@dataclass(frozen=True, slots=True)
class FailureAtMoment:
    """A request that failed, with its cause; the rest of the numbers is in `MomentMemory`.

    `requested` is rounded up to what PyTorch asks the driver for. `free` is what the driver
    reported, `total` the memory of the GPU; None if unknown.
    """

    requested: int
    free: int
    total: int | None
    cause: OomCause
    detail: OomDetail | None


@dataclass(frozen=True, slots=True)
class MomentMemory:
    """What PyTorch had reserved, in bytes; the parts from `in_use` to `private_free` add up to it.

    Attributes:
        in_use: blocks with a tensor.
        pending: freed blocks that wait for another stream.
        stranded: free bytes of the default pools that cannot go back to the driver.
        releasable: those that can.
        private_free: free bytes in the pools of CUDA graphs and MemPools.
        largest_free: the largest free block of the default pools.
        beside: the lines whose blocks the stranded bytes lie beside, the largest first.
        failed: the request that failed at this moment.
    """

    reserved: int
    in_use: int
    pending: int
    stranded: int
    releasable: int
    private_free: int
    largest_free: int
    beside: tuple[StrandedLine, ...]
    failed: FailureAtMoment | None = None


def moment_memory(lifetimes: Lifetimes, moment: int) -> MomentMemory | None:
    """Return the memory before the event number `moment`; None if it cannot be reconstructed.

    It is the final snapshot, in which the later events are undone.
    """
    trace = lifetimes.trace
    if lifetimes.events - moment > MAX_UNDONE:
        return None
    recording = trace.recording(moment)
    try:
        config = recorded_settings(recording).config
        segments = rebuild(recording, config).segments
    except UsageError:
        return None
    layout = measure(segments, trace.device, 0.0, config=config)
    reserved = sum(segment["total_size"] for segment in segments)
    pending = layout.pending_free_bytes or 0
    free = layout.stranded_bytes + layout.releasable_bytes
    return MomentMemory(
        reserved,
        reserved - free - layout.private_free_bytes - pending,
        pending,
        layout.stranded_bytes,
        layout.releasable_bytes,
        layout.private_free_bytes,
        layout.largest_free_block_bytes or 0,
        _beside(lifetimes, moment, segments),
        _failed(lifetimes, moment, segments, config),
    )


def _beside(
    lifetimes: Lifetimes, moment: int, segments: Sequence[SegmentInfo]
) -> tuple[StrandedLine, ...]:
    lines = LineFinder(lifetimes)
    by_address = {lifetimes.addresses[number]: number for number in lifetimes.in_use(moment)}
    found: dict[HolderLine, list[int]] = {}
    for address, size in _free_beside_blocks(segments):
        number = by_address.get(address)
        if number is not None:
            is_before = lifetimes.starts[number] == BEFORE
            line = lines.line(lifetimes.stacks[number], is_before=is_before)
            found.setdefault(line, []).append(size)
    rows = [StrandedLine(line, sum(sizes), len(sizes)) for line, sizes in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.line.text)))


def _free_beside_blocks(segments: Sequence[SegmentInfo]) -> Iterator[tuple[int, int]]:
    """Yield the size of each free block, and the address of the block in use before or after it."""
    for segment in segments:
        blocks = segment["blocks"]
        if segment["segment_pool_id"] != DEFAULT_POOL or len(blocks) < 2:
            continue
        if blocks[0]["state"] == "inactive":
            yield blocks[1]["address"], blocks[0]["size"]
        for before, block in pairwise(blocks):
            if block["state"] == "inactive":
                yield before["address"], block["size"]


def _failed(
    lifetimes: Lifetimes, moment: int, segments: Sequence[SegmentInfo], config: AllocatorConfig
) -> FailureAtMoment | None:
    """Return the request that failed at the event, if it is an OutOfMemoryError."""
    trace, facts = lifetimes.trace, lifetimes.trace.facts
    free = trace.columns.device_free.get(moment)
    if free is None:
        return None
    layout = measure(segments, trace.device, 0.0, config=config)
    reserved = sum(segment["total_size"] for segment in segments)
    requested = config.get_allocation_size(config.round_size(trace.columns.sizes[moment]))
    evidence = OomEvidence(
        requested=requested,
        limit=facts.limit_bytes or reserved + free,
        driver_free=free,
        cached_free=layout.releasable_bytes + layout.stranded_bytes,
        reserved=reserved,
        total=facts.total_bytes,
        private_free=layout.private_free_bytes,
        large_segment=config.large_segment_size,
    )
    stream = trace.columns.streams[moment]
    blocks = largest_free_blocks(segments, trace.device, requested, stream)
    verdict = judge(evidence, blocks, Circumstances(is_training=False))
    return FailureAtMoment(requested, free, facts.total_bytes, verdict.cause, verdict.detail)
