"""Blocks that are held briefly, to take memory from the driver or to keep part of the cache.

A block that is allocated and freed at once leaves its segment in the cache, and one that is
allocated while the cache is emptied keeps its segment there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchmem.allocator.backend import HeldBlock
from torchmem.allocator.sizes import GIB, MIB
from torchmem.allocator.snapshot import DEFAULT_POOL, SegmentInfo

# A segment that is taken from the driver has at least this size, unless less is missing.
MIN_SEGMENT_BYTES = GIB
# A segment that is larger than this multiple of what is wanted is not worth keeping for it.
MAX_KEPT_RATIO = 2
# cudaMalloc allocates in these units.
UNIT_BYTES = 2 * MIB


def segment_sizes(missing: int, *, expandable: bool = False) -> list[int]:
    """Return the sizes of the segments in which to take `missing` bytes: half, half of the rest, …

    A request is served from the smallest segment that fits. So small tensors that live long pin
    only a small segment, and large ones waste no more than the end of each segment.
    Expandable segments return single pages, so one is enough.
    """
    sizes = []
    while missing >= UNIT_BYTES:
        size = missing if expandable or missing < 2 * MIN_SEGMENT_BYTES else missing // 2
        size -= size % UNIT_BYTES
        sizes.append(size)
        missing -= size
    return sizes


def free_blocks(
    segments: Sequence[SegmentInfo], device: int, stream: int | None = None
) -> list[HeldBlock]:
    """Return the free blocks for large requests on one device, in the default pools, by size.

    With `stream` only those that this stream can use.
    """
    found = [
        HeldBlock(device, block["size"], segment["stream"])
        for segment in segments
        if segment["device"] == device
        and segment["segment_type"] == "large"
        and segment["segment_pool_id"] == DEFAULT_POOL
        and stream in {None, segment["stream"]}
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return sorted(found, key=lambda block: block.size)


def blocks_to_keep(segments: Sequence[SegmentInfo], device: int, wanted: int) -> list[HeldBlock]:
    """Return free segments of one device that together have `wanted` bytes, the smallest first.

    A request is served from the smallest block that fits, so the smallest segments are those that
    recent steps used. Of an expandable segment a part is enough.
    """
    whole = [each for each in segments if len(each["blocks"]) == 1 and not each["is_expandable"]]
    expandable = [each for each in segments if each["is_expandable"]]
    kept: list[HeldBlock] = []
    for block in free_blocks(whole, device):
        if wanted > 0 and block.size <= MAX_KEPT_RATIO * wanted:
            kept.append(block)
            wanted -= block.size
    for block in free_blocks(expandable, device):
        if wanted > 0:
            kept.append(replace(block, size=min(block.size, wanted)))
            wanted -= block.size
    return kept
