"""The content of a snapshot for one device, as plain values in PyTorch's own terms."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchmem.allocator.snapshot import DEFAULT_POOL, BlockState, PoolId


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of `device_traces`; see torch/csrc/cuda/memory_snapshot.cpp.

    Attributes:
        action: alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map,
            segment_unmap, oom or snapshot.
        address: 0 for oom.
        size: bytes; for alloc and free the requested size, which PyTorch records unrounded.
        device_free: for oom, the free bytes that the driver reported.
    """

    action: str
    address: int
    size: int
    stream: int
    pool: PoolId = DEFAULT_POOL
    device_free: int | None = None


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """One block of a segment; `requested_size` is None if it was not recorded."""

    address: int
    size: int
    requested_size: int | None
    state: BlockState


@dataclass(frozen=True, slots=True)
class RecordedSegment:
    """One segment of the snapshot, with its blocks by address."""

    address: int
    total_size: int
    stream: int
    is_small: bool
    is_expandable: bool
    pool: PoolId
    blocks: tuple[RecordedBlock, ...]


class SegmentPools:
    """Finds the pool of the segment at an address. The segments are given by address."""

    def __init__(self, segments: Sequence[RecordedSegment]) -> None:
        self._segments = segments
        self._starts = [segment.address for segment in segments]

    def at(self, address: int) -> PoolId:
        """Return the default pool where there is no segment."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._starts[index] + self._segments[index].total_size:
            return DEFAULT_POOL
        return self._segments[index].pool


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """What `torchmem capture` adds to a snapshot for one device, as of the recording's start.

    Sizes are bytes, and None if unknown.

    Attributes:
        torch_version: such as "2.13.0+cu130".
        block_sizes: the sizes of the blocks in use by address; empty if the trace is not complete.
        total_bytes: all memory of the GPU.
        limit_bytes: what the memory fraction lets the process reserve; `total_bytes` without one.
        free_bytes: what the driver could still allocate.
        reserved_bytes: what PyTorch had reserved.
        allocated_peak_bytes: the highest allocated bytes since the process began.
    """

    torch_version: str = ""
    block_sizes: Mapping[int, int] = field(default_factory=dict)
    total_bytes: int | None = None
    limit_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    allocated_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """One device of one snapshot: its final segments, and the trace that led to them.

    Attributes:
        events: the trace, oldest event first.
        settings: `allocator_settings` as PyTorch wrote them; empty if the version did not.
        truncated: whether the oldest entries were overwritten (`max_entries`) or cleared. True if a
            block in use has a recorded stack, but no allocation in the trace. False if the trace
            has the allocation of everything that it frees and of every block in use. None if
            neither is certain.
        ignored: the number of entries of kinds that do not affect memory.
        facts: what a capture adds; empty for other recordings.
    """

    name: str
    device: int
    segments: tuple[RecordedSegment, ...]
    events: tuple[Event, ...]
    settings: Mapping[str, object]
    truncated: bool | None = None
    ignored: int = 0
    facts: CaptureFacts = field(default_factory=CaptureFacts)
