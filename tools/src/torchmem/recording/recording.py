"""What a recorded snapshot tells about one device: plain values, in PyTorch's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PoolId = tuple[int, int]
"""Identity of a private pool (CUDA graph or MemPool), as in `segment_pool_id`; (0, 0) is the default pool."""

DEFAULT_POOL: PoolId = (0, 0)


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of `device_traces`, torch/csrc/cuda/memory_snapshot.cpp.

    `action`: alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom,
    snapshot. `size`: bytes, as requested for alloc and free (PyTorch records the unrounded size). `address`: 0 for oom.
    `device_free`: free bytes on the device that the driver told, for oom only.
    """

    action: str
    address: int
    size: int
    stream: int
    pool: PoolId = DEFAULT_POOL
    device_free: int | None = None


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """One block of a segment: `state` is active_allocated, active_pending_free or inactive."""

    address: int
    size: int
    requested_size: int | None
    state: str


@dataclass(frozen=True, slots=True)
class RecordedSegment:
    """One segment at the moment of the snapshot, its blocks in the order of their addresses."""

    address: int
    total_size: int
    stream: int
    is_small: bool
    is_expandable: bool
    pool: PoolId
    blocks: tuple[RecordedBlock, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """One device of one snapshot: the final segments, the trace before them (oldest first) and the settings in force.

    `settings`: `allocator_settings` of the snapshot as PyTorch wrote it, empty where the version did not.
    `truncated`: whether the oldest entries were overwritten (`max_entries`) or cleared: True when a block in use
    carries a stack of the recording but the trace does not hold its allocation, False when the trace holds the
    allocation of everything it frees and leaves, None when nobody can tell. `ignored`: entries of kinds that touch no
    memory.
    """

    name: str
    device: int
    segments: tuple[RecordedSegment, ...]
    events: tuple[Event, ...]
    settings: Mapping[str, object]
    truncated: bool | None = None
    ignored: int = 0
