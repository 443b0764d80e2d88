"""The allocator's garbage collection: cached segments that went unused for long go back before memory runs out.

Source: `DeviceCachingAllocator::garbage_collect_cached_blocks`, PyTorch 2.13.
"""

from __future__ import annotations

from torchmem.simulator.blocks import Block, BlockPool
from torchmem.simulator.release import CachedBlocks


def garbage_collect_cached_blocks(large_blocks: BlockPool, target_size: int, cached: CachedBlocks) -> None:
    """Give back whole free segments of the large pool, the oldest first, `target_size` bytes or more.

    The age of a block is the number of searches in its pool since it was freed. Each round gives back every block
    that reaches the mean age of those that are left.
    """
    freeable = [block for block in large_blocks if not block.is_split()]
    reclaimed = 0
    while reclaimed < target_size and freeable:
        mean_age = sum(_age(block) for block in freeable) / len(freeable)
        old = [block for block in freeable if _age(block) >= mean_age]
        freeable = [block for block in freeable if _age(block) < mean_age]
        for block in old:
            reclaimed += block.size
            cached.release_block(block)


def _age(block: Block) -> int:
    return block.pool.get_free_blocks_call_count - block.gc_count_base
