"""Combine a snapshot with statistics that were read later.

A snapshot is taken rarely and at a random moment of a step, the statistics at the end of a step.
Each is right for its own time, so most of a layout stays as it is. But once the allocator has
returned memory to the driver, free blocks of the snapshot are gone, and the headroom depends on
what the driver has free now.
"""

from __future__ import annotations

from dataclasses import replace

from torchmem.allocator.fragmentation import Measurement
from torchmem.allocator.headroom import AvailableMemory, headroom
from torchmem.sample.sample import Allocator, Layout

MAX_SKEW_BYTES = 32 << 20
"""How far two sums of the same memory may differ because one was read shortly after the other."""


def returned_bytes(measured: Measurement, allocator: Allocator) -> int:
    """Return by how much the reserved bytes have fallen since the snapshot."""
    return max(0, measured.reserved_bytes - allocator.reserved_bytes.total)


def is_outdated(measured: Measurement, allocator: Allocator) -> bool:
    """Return whether the allocator has returned memory or taken more since the snapshot."""
    change = allocator.reserved_bytes.total - measured.reserved_bytes
    return abs(change) > MAX_SKEW_BYTES


def layout_at(measured: Measurement, allocator: Allocator, available: AvailableMemory) -> Layout:
    """Return the layout beside newer statistics, read together with the `available` memory.

    The headroom is computed anew: from what the driver has now, and what is certainly left of the
    cache. If memory was returned, the free bytes are upper bounds, and what depends on single
    blocks is unknown.
    """
    layout, returned = measured.layout, returned_bytes(measured, allocator)
    if returned > MAX_SKEW_BYTES:
        layout = _without_returned(layout, returned, allocator)
    if layout.headroom_bytes is None:
        return layout
    return replace(
        layout,
        headroom_bytes=_headroom(measured, allocator, available, flush=False),
        headroom_flush_bytes=_headroom(measured, allocator, available, flush=True),
    )


def _without_returned(layout: Layout, returned: int, allocator: Allocator) -> Layout:
    free = max(0, allocator.reserved_bytes.total - allocator.active_bytes.total)
    stranded = min(layout.stranded_bytes, free)
    releasable = max(0, min(layout.releasable_bytes - returned, free - stranded))
    return replace(
        layout,
        segments=None,
        blocks=None,
        stranded_bytes=stranded,
        releasable_bytes=releasable,
        private_free_bytes=min(layout.private_free_bytes, free - stranded - releasable),
        largest_free_block_bytes=None,
        free_block_counts=None,
        in_use_bytes=None,
    )


def _headroom(
    measured: Measurement, allocator: Allocator, available: AvailableMemory, *, flush: bool
) -> int:
    """Return the largest request that succeeds at the time of the statistics, as far as is known.

    A request is served by the driver, by the cache, or by both: with expandable segments, and after
    a flush.
    """
    free = allocator.reserved_bytes.total - allocator.allocated_bytes.total
    then = measured.flushed if flush else measured.cached
    now = then.after(returned_bytes(measured, allocator), max(0, free))
    size = headroom(now, available, measured.config, flush=flush)
    driver = max(0, available.obtainable(0))
    by_both = flush or measured.config.expandable_segments
    return min(size, driver + free if by_both else max(driver, free))
