"""The allocator's blocks as the structure that `torch.cuda.memory_snapshot()` returns.

Putting the blocks of a snapshot back into an allocator, so that it goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from operator import itemgetter

from torchmem.allocator.snapshot import DEFAULT_POOL, BlockInfo, BlockState, PoolId, SegmentInfo
from torchmem.simulator.blocks import Block, BlockPool
from torchmem.simulator.device_memory import DeviceMemory


def segment_infos(blocks: Iterable[Block], device: int) -> list[SegmentInfo]:
    """The segments that `blocks` (all blocks of a device, in any order) make up, by address.

    An expandable segment counts once for each contiguous range that has memory.

    Source: `DeviceCachingAllocator::snapshot`, PyTorch 2.13; stack frames, kept only with history on, are left out.
    """
    heads = (block for block in blocks if block.prev is None or not block.prev.mapped)
    return [_segment_info(head, device) for head in sorted(heads, key=lambda block: block.address)]


def _segment_info(head: Block, device: int) -> SegmentInfo:
    blocks = list(_segment_blocks(head))
    active = [block for block in blocks if block.allocated or block.event_count]
    return {
        "device": device,
        "address": head.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in active if block.allocated),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested_size for block in active),
        "stream": head.stream,
        "segment_type": "small" if head.pool.is_small else "large",
        "segment_pool_id": DEFAULT_POOL if head.pool.owner is None else head.pool.owner.id,
        "is_expandable": head.expandable_segment is not None,
        "blocks": [_block_info(block) for block in blocks],
    }


def _segment_blocks(head: Block) -> Iterator[Block]:
    block: Block | None = head
    while block is not None and block.mapped:
        yield block
        block = block.next


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


RangeKey = tuple[PoolId, int, str]
"""Whose address ranges an expandable segment may lie in: pool, stream, and "small" or "large"."""
AWAITED_STREAM = -1
"""The stream whose event a block waits for that was pending in the snapshot, which does not tell the stream."""


def range_key(segment: SegmentInfo) -> RangeKey:
    """Segments with the same key may lie in one address range."""
    return segment["segment_pool_id"], segment["stream"], segment["segment_type"]


def restore_blocks(
    memory: DeviceMemory, segments: Iterable[SegmentInfo], first_addresses: Mapping[RangeKey, int]
) -> Iterator[Block]:
    """Put segments into an empty memory, by address; gives every block that is not free.

    An expandable segment belongs to the range of the one before it if that range reaches so far. A range begins with
    its first segment, or at its key's address in `first_addresses` if that is lower.

    Raises:
        ValueError: the card has too little memory for them.
    """
    ranges: dict[RangeKey, Block] = {}
    for segment in sorted(segments, key=itemgetter("address")):
        pool = _pool_of(memory, segment)
        blocks = [_block(memory, pool, segment, index) for index in range(len(segment["blocks"]))]
        for left, right in pairwise(blocks):
            right.splice(left, None)
        if segment["is_expandable"]:
            key = range_key(segment)
            first = min(segment["address"], first_addresses.get(key, segment["address"]))
            ranges[key] = memory.expandable_segments.adopt(ranges.get(key), blocks, first)
        else:
            memory.cached.adopt(blocks)
        for block in blocks:
            if _count(block):
                yield block


def _pool_of(memory: DeviceMemory, segment: SegmentInfo) -> BlockPool:
    is_small, pool_id = segment["segment_type"] == "small", segment["segment_pool_id"]
    if pool_id == DEFAULT_POOL:
        return memory.small_blocks if is_small else memory.large_blocks
    pools = memory.private_pools.graph_pools
    if pool_id not in pools:
        memory.private_pools.create_or_incref_pool(pool_id)
    return pools[pool_id].small_blocks if is_small else pools[pool_id].large_blocks


def _block(memory: DeviceMemory, pool: BlockPool, segment: SegmentInfo, index: int) -> Block:
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
    if block.stream_uses or block.allocated:
        oversize = (
            memory.config.max_split_size is not None and block.size >= memory.config.max_split_size
        )
        memory.stats.oversize_allocations.increase(int(oversize and block.allocated))
    return block


def _count(block: Block) -> bool:
    """Add a block to the statistics, and a free one to its pool; whether it is in use."""
    stats = block.pool.stats
    if block.allocated or block.stream_uses:
        stats.block_allocated(block.size, block.requested_size)
        if not block.allocated:
            stats.block_returned(block.size)
        return True
    block.pool.insert_into_blocks(block)
    if block.is_split() and block.expandable_segment is None:
        stats.inactive_split_changed(1, block.size)
    return False
