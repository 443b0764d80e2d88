"""Expandable segments: what their free blocks could return, and where and from what on they can grow.

An expandable segment is an address range of which pages are mapped; a snapshot shows each contiguous mapped range as a
segment of its own, gaps only as holes between the addresses. c10/cuda/CUDACachingAllocator.cpp,
`find_expandable_block` and `unmap_block`, PyTorch 2.13. All sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torchmem.core.snapshot import SegmentInfo


@dataclass(frozen=True, slots=True)
class GrowingEnd:
    """The end of a mapped range, with the unmapped gap behind it.

    `space`: length of the free and unmapped addresses there, unlimited behind the last range; `free`, `free_flushed`:
    how much of its beginning is mapped already, now and after a flush.
    """

    space: float
    free: int
    free_flushed: int


def full_pages(offset: int, size: int, page: int) -> int:
    """Bytes of the pages that lie fully inside a free block at `offset` of an expandable segment."""
    first = -(-offset // page) * page
    last = (offset + size) // page * page
    return max(0, last - first)


def returnable_bytes(segment: SegmentInfo, page: int) -> int:
    """What a flush returns of an expandable segment: the pages that lie fully inside free blocks."""
    start, blocks = segment["address"], segment["blocks"]
    return sum(full_pages(b["address"] - start, b["size"], page) for b in blocks if b["state"] == "inactive")


def growing_ends(ranges: Sequence[SegmentInfo], page: int) -> Iterator[GrowingEnd]:
    """The end of each range of one pool and stream, `ranges` in the order of their addresses."""
    for this, following in zip_longest(ranges, ranges[1:]):
        last = this["blocks"][-1]
        free = last["size"] if last["state"] == "inactive" else 0
        flushed = min(free, -(last["address"] - this["address"]) % page)
        yield GrowingEnd(_space(this, following, free), free, flushed)


def _space(this: SegmentInfo, following: SegmentInfo | None, free: int) -> float:
    if following is None:
        return math.inf
    head = following["blocks"][0]
    gap = following["address"] - this["address"] - this["total_size"]
    return free + gap + (head["size"] if head["state"] == "inactive" else 0)


def grown_request(ends: Sequence[GrowingEnd], obtainable: int, page: int, *, flush: bool) -> int:
    """Largest request that new pages can serve when the driver can give `obtainable` bytes.

    The allocator takes the first gap that is long enough, so the least that any such gap begins with counts. A gap
    before the first range is invisible and taken not to exist.
    """
    pages = max(0, obtainable) // page * page
    begun = [end.free_flushed if flush else end.free for end in ends if end.space >= pages]
    return pages + min(begun, default=0)
