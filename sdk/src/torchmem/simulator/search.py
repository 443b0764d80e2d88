"""Which free block serves a request, and whether it is split, when settings or pools change the best fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchmem.core.allocator_config import AllocatorConfig
from torchmem.core.sizes import MIN_BLOCK_SIZE, SMALL_SIZE
from torchmem.simulator.blocks import Block, BlockPool

UNLIMITED = (1 << 64) - 1
"""`max_split_size` when none is set."""


@dataclass(frozen=True, slots=True)
class AllocParams:
    """One request: its size as asked for and rounded, its stream and pool, and the segment it would need, in bytes."""

    orig_size: int
    size: int
    stream: int
    pool: BlockPool
    alloc_size: int
    is_expandable_segments_active: bool


def get_free_block(params: AllocParams, config: AllocatorConfig) -> Block | None:
    """Take the free block that serves the request; None when a new segment is needed.

    Only one candidate is held against the rules on oversize blocks: after a refusal nothing else is tried.
    """
    candidates = params.pool.of_stream(params.stream).at_least(params.size)
    block = next(candidates, None)
    if block is not None and block.expandable_segment is not None:
        if params.is_expandable_segments_active:
            block = _least_expandable(block, candidates)
        else:
            block = next((other for other in candidates if other.expandable_segment is None), None)
    if block is None or not config.may_use(block.size, params.size):
        return None
    params.pool.erase(block)
    return block


def should_split(block: Block, size: int, is_expandable_segments_active: bool, max_split_size: int) -> bool:
    """Whether the part of the block that a request of `size` bytes does not need becomes a free block."""
    pool, remaining = block.pool, block.size - size
    if pool.owner is not None and pool.owner.no_split:
        return False
    if pool.is_small or is_expandable_segments_active:
        return remaining >= MIN_BLOCK_SIZE
    return remaining > SMALL_SIZE and size < max_split_size


def _least_expandable(block: Block, candidates: Iterator[Block]) -> Block:
    """The best fit when a block counts with the free address space behind it, as in `get_free_block`."""
    for following in candidates:
        if block.expandable_segment is None or _expandable_size(following) >= _expandable_size(block):
            break
        block = following
    return block


def _expandable_size(block: Block) -> int:
    following = block.next
    return block.size if following is None or following.mapped else block.size + following.size
