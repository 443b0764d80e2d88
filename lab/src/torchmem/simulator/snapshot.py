"""The allocator's blocks as `torch.cuda.memory_snapshot()` returns them, and the way back.

Source: `DeviceCachingAllocator::snapshot`, PyTorch 2.13. Stack frames, which PyTorch records only
with history on, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from operator import attrgetter, itemgetter

from torchmem.allocator.snapshot import DEFAULT_POOL, BlockInfo, BlockState, PoolId, SegmentInfo
from torchmem.simulator.blocks import Block, BlockPool
from torchmem.simulator.device_memory import DevicePools

RangeKey = tuple[PoolId, int, str]
"""Pool, stream, and "small" or "large": segments with equal keys may share an address range."""
AWAITED_STREAM = -1
"""Stands for the stream that a pending block waits for, which a snapshot does not name."""


def segment_infos(blocks: Iterable[Block], device: int) -> list[SegmentInfo]:
    """Return the segments of all `blocks` of a device, by address.

    Each contiguous range of an expandable segment that has memory is a segment of its own.
    """
    heads = [block for block in blocks if (prev := block.prev) is None or not prev.mapped]
    return [_segment_info(head, device) for head in sorted(heads, key=attrgetter("address"))]


def _segment_info(head: Block, device: int) -> SegmentInfo:
    blocks: list[BlockInfo] = []
    total_size = allocated_size = active_size = requested_size = 0
    block: Block | None = head
    while block is not None and block.mapped:
        total_size += block.size
        if block.allocated or block.event_count:
            active_size += block.size
            requested_size += block.requested_size
            if block.allocated:
                allocated_size += block.size
        blocks.append(_block_info(block))
        block = block.next
    return {
        "device": device,
        "address": head.address,
        "total_size": total_size,
        "allocated_size": allocated_size,
        "active_size": active_size,
        "requested_size": requested_size,
        "stream": head.stream,
        "segment_type": "small" if head.pool.is_small else "large",
        "segment_pool_id": DEFAULT_POOL if head.pool.owner is None else head.pool.owner.id,
        "is_expandable": head.expandable_segment is not None,
        "blocks": blocks,
    }


def _block_info(block: Block) -> BlockInfo:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested_size,
        "state": _state(block),
    }


def _state(block: Block) -> BlockState:
    if block.allocated:
        return "active_allocated"
    return "active_pending_free" if block.event_count else "inactive"


def range_key(segment: SegmentInfo) -> RangeKey:
    """Return the key of the address ranges that an expandable segment may lie in."""
    return segment["segment_pool_id"], segment["stream"], segment["segment_type"]


def restore_blocks(
    memory: DevicePools,
    segments: Iterable[SegmentInfo],
    first_addresses: Mapping[RangeKey, int],
    numbers: Mapping[int, int],
) -> Iterator[Block]:
    """Load segments into an empty memory; yield every block that is not free.

    An expandable segment belongs to the range of the one before it, if that range reaches far
    enough. A range starts at its first segment. The lowest range of a key starts at its address in
    `first_addresses` if that is lower. `numbers` are those of `CachedBlocks.adopt`.

    Raises:
        ValueError: the GPU has too little memory.
    """
    ranges: dict[RangeKey, Block] = {}
    for segment in sorted(segments, key=itemgetter("address")):
        pool = _pool_of(memory, segment)
        blocks = [_block(memory, pool, segment, index) for index in range(len(segment["blocks"]))]
        for left, right in pairwise(blocks):
            right.splice(left, None)
        if segment["is_expandable"]:
            key = range_key(segment)
            first = segment["address"]
            if key not in ranges:
                first = min(first, first_addresses.get(key, first))
            ranges[key] = memory.expandable_segments.adopt(ranges.get(key), blocks, first)
        else:
            memory.cached.adopt(blocks, numbers)
        for block in blocks:
            _count(block)
            if block.allocated or block.stream_uses:
                yield block


def _pool_of(memory: DevicePools, segment: SegmentInfo) -> BlockPool:
    is_small, pool_id = segment["segment_type"] == "small", segment["segment_pool_id"]
    if pool_id == DEFAULT_POOL:
        return memory.small_blocks if is_small else memory.large_blocks
    pools = memory.private_pools.graph_pools
    if pool_id not in pools:
        memory.private_pools.create_or_incref_pool(pool_id)
    return pools[pool_id].small_blocks if is_small else pools[pool_id].large_blocks


def _block(memory: DevicePools, pool: BlockPool, segment: SegmentInfo, index: int) -> Block:
    info = segment["blocks"][index]
    block = Block(
        segment["stream"],
        info["size"],
        pool,
        info["address"],
        requested_size=info["requested_size"],
    )
    block.allocated = info["state"] == "active_allocated"
    if not block.allocated and info["state"] != "inactive":
        block.stream_uses = {AWAITED_STREAM}
    max_split_size = memory.config.max_split_size
    if block.allocated and max_split_size is not None and block.size >= max_split_size:
        memory.stats.oversize_allocations.increase(1)
    return block


def _count(block: Block) -> None:
    """Add a block to the statistics, and to its pool if it is free."""
    stats = block.pool.stats
    if block.allocated or block.stream_uses:
        stats.block_allocated(block.size, block.requested_size)
        if not block.allocated:
            stats.block_returned(block.size)
        return
    block.pool.insert_into_blocks(block)
    if block.is_split() and block.expandable_segment is None:
        block.pool.inactive_split_changed(1, block.size)
