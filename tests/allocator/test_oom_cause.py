"""What an OutOfMemoryError leaves to judge, from what the observer knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.snapshots import segment, segments

from torchmem.allocator.oom_cause import (
    LargestFreeBlocks,
    OomEvidence,
    fragmentation_detail,
    largest_free_blocks,
)
from torchmem.allocator.snapshot import SegmentInfo

GIB = 1 << 30
MIB = 1 << 20
FULL = OomEvidence(
    requested=2 * GIB,
    limit=80 * GIB,
    driver_free=1 * GIB,
    cached_free=0,
    reserved=78 * GIB,
    total=80 * GIB,
)


FREE = replace(FULL, cached_free=30 * GIB)
PRIVATE_FREE = replace(FULL, private_free=30 * GIB)
SMALL = replace(FREE, requested=2 * MIB, driver_free=MIB)
MEDIUM = replace(FREE, requested=20 * MIB, driver_free=3 * MIB)
MEDIUM_FULL = replace(MEDIUM, driver_free=MIB)
LARGE_SEGMENT = replace(FREE, requested=64 * MIB, large_segment=64 * MIB)


@pytest.mark.parametrize(
    ("evidence", "blocks", "detail"),
    [
        (FREE, LargestFreeBlocks(own=GIB), "stranded"),
        (FREE, LargestFreeBlocks(own=GIB, other_stream=2 * GIB), "stream"),
        (FREE, LargestFreeBlocks(own=GIB, other_pool=2 * GIB), "pool"),
        (PRIVATE_FREE, LargestFreeBlocks(own=GIB, other_pool=GIB), "pool"),
        (MEDIUM, LargestFreeBlocks(own=2 * MIB), "small_segment"),
        (MEDIUM, LargestFreeBlocks(own=10 * MIB), "stranded"),
        (MEDIUM_FULL, LargestFreeBlocks(own=2 * MIB), "stranded"),
        (LARGE_SEGMENT, LargestFreeBlocks(own=2 * MIB), "small_segment"),
        (SMALL, LargestFreeBlocks(other_pool=MIB), "pool"),
        (SMALL, LargestFreeBlocks(own=MIB // 2), "stranded"),
    ],
)
def test_kinds_of_fragmentation(
    evidence: OomEvidence, blocks: LargestFreeBlocks, detail: str
) -> None:
    """The location of a block that would fit determines the kind of fragmentation."""
    assert detail == fragmentation_detail(evidence, blocks)


@given(segments(), st.sampled_from([0, 7, None]), st.sampled_from([2 * MIB, 20 * MIB, GIB]))
def test_the_largest_free_blocks_are_found(
    snapshot: list[SegmentInfo], stream: int | None, requested: int
) -> None:
    """The largest free block is found, and `own` is of the request's stream and default pool."""
    largest = largest_free_blocks(snapshot, 0, requested, stream)
    pool = "small" if requested == 2 * MIB else "large"
    own_place = (stream, pool, (0, 0))
    own, other = [0], [0]
    for info in snapshot:
        place = (info["stream"], info["segment_type"], info["segment_pool_id"])
        blocks = own if place == own_place else other
        blocks += [b["size"] for b in info["blocks"] if b["state"] != "active_allocated"]

    assert max(own) == largest.own
    assert max(other) == max(largest.other_stream, largest.other_pool)


def test_blocks_of_other_devices_are_ignored() -> None:
    """A free block on another device does not count."""
    assert LargestFreeBlocks() == largest_free_blocks(
        [segment(0, "large", [(GIB, "inactive")], device=1)], 0, GIB, 0
    )


def test_what_nccl_counts_is_not_of_other_processes() -> None:
    """Communicators are subtracted from what others can hold, also beyond the usual allowance."""
    outside = replace(FULL, reserved=60 * GIB, driver_free=0)
    counted = replace(outside, communicators=10 * GIB)

    assert outside.foreign(GIB, is_alone=True) == 19 * GIB
    assert counted.foreign(GIB, is_alone=True) == counted.foreign(None, is_alone=False) == 9 * GIB
    assert outside.foreign(GIB, is_alone=False) == 16 * GIB
    assert counted.foreign(GIB, is_alone=False) == 9 * GIB
