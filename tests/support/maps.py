"""Memory maps for tests, made from snapshots as the SDK makes them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from support.samples import UUID
from support.snapshots import segment

from torchmem.allocator.backend import Device
from torchmem.allocator.fragmentation import measure
from torchmem.allocator.memory_map import device_map
from torchmem.allocator.settings import DEFAULT_CONFIG
from torchmem.allocator.sizes import MIB
from torchmem.allocator.snapshot import SegmentInfo
from torchmem.sample.memory_map import DeviceMap, MemoryMap

USED, PENDING, FREE = "active_allocated", "active_pending_free", "inactive"


def device_of(
    segments: Sequence[SegmentInfo], uuid: str = UUID, timestamp: float = 0.0, **bound: int
) -> DeviceMap:
    """Return the map of one device; `max_blocks` bounds it."""
    layout = measure(segments, 0, timestamp)
    device = Device(0, uuid, "NVIDIA H100", 80 << 30)
    return device_map(segments, device, layout, DEFAULT_CONFIG, **bound)


def map_of(
    segments: Sequence[SegmentInfo], uuid: str = UUID, timestamp: float | None = None
) -> MemoryMap:
    """Return the map of a snapshot of one device."""
    now = time.time() if timestamp is None else timestamp
    return MemoryMap(now, [device_of(segments, uuid, now)])


def varied_segments() -> list[SegmentInfo]:
    """Return segments of every kind, with blocks in every state."""
    return [
        segment(1 << 40, "large", [(12 * MIB, USED), (6 * MIB, FREE), (2 * MIB, PENDING)]),
        segment(2 << 40, "large", [(20 * MIB, FREE)]),
        segment(3 << 40, "small", [(512, USED), (MIB, FREE), (MIB - 512, USED)], stream=0x55D0),
        segment(4 << 40, "large", [(32 * MIB, USED), (8 * MIB, FREE)], segment_pool_id=(0, 3)),
        segment(
            5 << 40, "large", [(30 * MIB, USED), (70 * MIB, FREE)], is_expandable=True, stream=7
        ),
    ]


def full_map(timestamp: float = 1.7e9) -> MemoryMap:
    """Return a map in which every field has a value."""
    return map_of(varied_segments(), timestamp=timestamp)
