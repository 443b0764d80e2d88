"""Size arithmetic of the allocator: how it rounds requests, and how large its segments are.

Source of constants and functions: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h,
PyTorch 2.13, default settings (no roundup_power2_divisions, 20 MiB large segments). All sizes are
in bytes. This file also formats and parses sizes for people.
"""

from __future__ import annotations

import math
import re

MIB = 1 << 20
GIB = 1 << 30

MIN_BLOCK_SIZE = 512
"""kMinBlockSize: block sizes are multiples of it."""
SMALL_SIZE = 1 * MIB
"""kSmallSize: the largest block of the small pool."""
SMALL_BUFFER = 2 * MIB
"""kSmallBuffer: the size of a segment in the small pool."""
LARGE_BUFFER = 20 * MIB
"""kLargeBuffer: the segment for blocks above kSmallSize and below kMinLargeAlloc.

It is also the page size of expandable segments in the large pool."""
MIN_LARGE_ALLOC = 10 * MIB
"""kMinLargeAlloc: a block of at least this size gets a segment of its own size."""
ROUND_LARGE = 2 * MIB
"""kRoundLarge: the sizes of such segments are multiples of it."""

MAX_SIZE = 1 << 62
_SIZE = r"([0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[0-9]{1,2})?)\s*(?:([kmgt])(i)?b?|b)?"


def round_size(size: int) -> int:
    """Return the size of the block that serves a request of `size` bytes."""
    if size < MIN_BLOCK_SIZE:
        return MIN_BLOCK_SIZE
    return (size + MIN_BLOCK_SIZE - 1) // MIN_BLOCK_SIZE * MIN_BLOCK_SIZE


def get_allocation_size(size: int) -> int:
    """Return the size of the segment that is allocated for a block of `size` bytes."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


def format_size(size: int, like: int | None = None) -> str:
    """Format `size`: "512 bytes", "1.50 MiB", "1.00 GiB", "-1.00 GiB".

    With `like`, use the unit of that size, so that all sizes in a table have the same unit.
    """
    measure = abs(size if like is None else like)
    if measure < 1 << 10:
        return f"{size} bytes"
    for unit, shift in (("KiB", 10), ("MiB", 20)):
        if round(measure / (1 << shift), 2) < 1024:
            return f"{size / (1 << shift):.2f} {unit}"
    return f"{size / GIB:.2f} GiB"


def format_index(ratio: float) -> str:
    """Format a fragmentation index: "0.84".

    It is never rounded up to 1, which it cannot reach. format.js does the same for the live page.
    """
    hundredths = math.floor(ratio * 100 + 0.5)
    return f"{(min(hundredths, 99) if ratio < 1 else hundredths) / 100:.2f}"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "24GB" (10^9), "22.5GiB" (2^30), "8192M" or "1e9".

    Raises ValueError when `text` is not a size of at least one byte and below 2^62.
    """
    match = re.fullmatch(_SIZE, text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not a size: write it as 24GB or 22.5GiB")
    number, prefix, binary = match.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    size = int(float(number) * (1024 if binary else 1000) ** power)
    if not 0 < size < MAX_SIZE:
        raise ValueError(f"{text[:40]!r} is out of range: write a size such as 24GB or 22.5GiB")
    return size
