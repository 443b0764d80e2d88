"""The allocator's size arithmetic: how a request is rounded, and how large a segment it asks the driver for.

Constants and functions: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, PyTorch 2.13, default
settings (no roundup_power2_divisions, 20 MiB large segments). All sizes are bytes.
"""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30

MIN_BLOCK_SIZE = 512
"""kMinBlockSize: every block is a multiple of it."""
SMALL_SIZE = 1 * MIB
"""kSmallSize: the largest block of the small pool."""
SMALL_BUFFER = 2 * MIB
"""kSmallBuffer: a segment of the small pool."""
LARGE_BUFFER = 20 * MIB
"""kLargeBuffer: the segment for blocks above kSmallSize and below kMinLargeAlloc, and a page of expandable segments."""
MIN_LARGE_ALLOC = 10 * MIB
"""kMinLargeAlloc: from this size on a block gets a segment of its own size."""
ROUND_LARGE = 2 * MIB
"""kRoundLarge: such segments are multiples of it."""


def round_size(size: int) -> int:
    """Size of the block that serves a request of `size` bytes."""
    if size < MIN_BLOCK_SIZE:
        return MIN_BLOCK_SIZE
    return (size + MIN_BLOCK_SIZE - 1) // MIN_BLOCK_SIZE * MIN_BLOCK_SIZE


def get_allocation_size(size: int) -> int:
    """Size of the segment requested from the driver for a block of `size` bytes (already rounded)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


def format_size(size: int) -> str:
    """`size` as PyTorch's error texts write it: "512 bytes", "1.50 MiB"."""
    if size <= 1 << 10:
        return f"{size} bytes"
    for unit, shift in (("KiB", 10), ("MiB", 20)):
        if size <= 1 << (shift + 10):
            return f"{size / (1 << shift):.2f} {unit}"
    return f"{size / GIB:.2f} GiB"
