"""What the recorded program did, without what the allocator did about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torchmem.simulator.recording.trace import PoolId


class Act(IntEnum):
    """What a program can do to an allocator.

    MALLOC: a request that was served. TRY: one that failed; if it is served now, the block goes back at once, because
    nobody knows for how long it would have been held. FREE: a block is given back. FREE_LATER, COMPLETE: likewise, in
    two parts, when other streams used the block. EMPTY_CACHE: `torch.cuda.empty_cache()`. RELEASE_POOL: the last user
    of a private pool is gone. EMPTY_POOL: its cache goes back.
    """

    MALLOC = 0
    TRY = 1
    FREE = 2
    FREE_LATER = 3
    COMPLETE = 4
    EMPTY_CACHE = 5
    RELEASE_POOL = 6
    EMPTY_POOL = 7


Step = tuple[Act, int, int, int, int, PoolId]
"""Act, number of its event, recorded address, requested bytes, stream, pool; a plain tuple, as there are millions."""


@dataclass(frozen=True, slots=True)
class Program:
    """The steps in order, and the private pools that they use."""

    steps: list[Step]
    pools: frozenset[PoolId]
