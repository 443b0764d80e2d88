"""Types of `torch.cuda.memory_snapshot()` and of the nested memory statistics.

Both stay the builtin structures that PyTorch returns: a snapshot has up to 10^5 blocks, and
converting each to a dataclass would cost more than the measurement. Source:
torch/csrc/cuda/Module.cpp (`THCPModule_memorySnapshot`, `THCPModule_memoryStats`), PyTorch 2.13.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypedDict

BlockState = Literal["active_allocated", "active_pending_free", "inactive"]
SegmentType = Literal["small", "large"]
PoolId = tuple[int, int]

DEFAULT_POOL: PoolId = (0, 0)

NestedStats = Mapping[str, Any]
"""The result of `torch.cuda.memory_stats_as_nested_dict()`.

It maps statistic → pool → current, peak, allocated or freed, and also holds plain counters."""


class FrameInfo(TypedDict):
    """A call in a recorded stack."""

    filename: str
    line: int
    name: str


class _BlockInfo(TypedDict):
    address: int
    size: int
    requested_size: int
    state: BlockState


class BlockInfo(_BlockInfo, total=False):
    """A block of a segment; sizes in bytes.

    `frames` is the stack of its allocation from the innermost call outwards; empty or absent if it
    was not recorded.
    """

    frames: list[FrameInfo]


class SegmentInfo(TypedDict):
    """A cudaMalloc'ed segment, or a mapped range of an expandable segment; sizes in bytes."""

    device: int
    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int
    stream: int
    segment_type: SegmentType
    segment_pool_id: PoolId
    is_expandable: bool
    blocks: list[BlockInfo]


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable Python's garbage collector, which would traverse millions of new dicts repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
