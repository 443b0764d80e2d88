"""The allocator's blocks as the structure that `torch.cuda.memory_snapshot()` returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchmem.core.snapshot import DEFAULT_POOL, BlockInfo, BlockState, SegmentInfo
from torchmem.simulator.blocks import Block


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
