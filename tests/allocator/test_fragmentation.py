"""Measuring snapshots: properties that hold for every snapshot, and examples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.snapshots import segment, segments

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.headroom import AvailableMemory, full_pages
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import GIB, MIB
from torchmem.allocator.snapshot import SegmentInfo

available_memory = st.builds(
    AvailableMemory,
    st.integers(0, 80 * GIB),
    st.integers(0, 80 * GIB),
    st.none() | st.integers(0, 80 * GIB),
)


def free_sizes(snapshot: list[SegmentInfo]) -> list[int]:
    """Return the sizes of free blocks in the default pools."""
    return sizes_of(snapshot, "inactive")


def sizes_of(snapshot: list[SegmentInfo], state: str) -> list[int]:
    """Return the sizes of blocks in the default pools, without the code under test."""
    default = [info for info in snapshot if info["segment_pool_id"] == (0, 0)]
    return [
        block["size"] for info in default for block in info["blocks"] if block["state"] == state
    ]


@given(segments())
def test_fragmentation_ratio_lies_in_zero_to_one(snapshot: list[SegmentInfo]) -> None:
    """The ratio is in [0, 1) if any memory is free, and None otherwise."""
    layout = measure(snapshot, 0, 1.0)

    if free_sizes(snapshot):
        assert layout.fragmentation_ratio is not None
        assert 0 <= layout.fragmentation_ratio < 1
    else:
        assert layout.fragmentation_ratio is None


@given(segments())
def test_stranded_and_releasable_add_up_to_free(snapshot: list[SegmentInfo]) -> None:
    """Each free byte of the default pools is either releasable or stranded."""
    layout = measure(snapshot, 0, 1.0)

    assert sum(free_sizes(snapshot)) == layout.releasable_bytes + layout.stranded_bytes
    assert layout.stranded_bytes >= 0
    assert max(free_sizes(snapshot), default=0) == layout.largest_free_block_bytes


@given(segments())
def test_the_largest_allocated_block_is_that_of_a_tensor(snapshot: list[SegmentInfo]) -> None:
    """It is the largest block of the default pools that is neither free nor waits for a stream."""
    sizes = sizes_of(snapshot, "active_allocated")

    assert max(sizes, default=0) == measure(snapshot, 0, 1.0).largest_allocated_block_bytes


@given(segments())
def test_histogram_counts_every_free_block_once(snapshot: list[SegmentInfo]) -> None:
    """The free-block histogram counts each free block of the snapshot once."""
    layout = measure(snapshot, 0, 1.0)

    free = len(free_sizes(snapshot))
    assert free == sum(layout.free_block_counts or ())
    assert free == (layout.blocks.inactive.total if layout.blocks else None)


@given(segments(), available_memory)
def test_flushing_never_lowers_the_headroom(
    snapshot: list[SegmentInfo], available: AvailableMemory
) -> None:
    """A request that succeeds without the retry flush also succeeds with it."""
    layout = measure(snapshot, 0, 1.0, available, AllocatorConfig(expandable_segments=True))

    assert layout.headroom_bytes is not None
    assert layout.headroom_flush_bytes is not None
    assert 0 <= layout.headroom_bytes <= layout.headroom_flush_bytes


@given(segments(), st.integers(0, 80 * GIB), st.integers(0, 8 * GIB))
def test_more_driver_memory_never_lowers_the_headroom(
    snapshot: list[SegmentInfo], free: int, more: int
) -> None:
    """Headroom never decreases when the driver has more free memory."""
    less, greater = (
        measure(snapshot, 0, 1.0, AvailableMemory(amount)) for amount in (free, free + more)
    )

    assert (less.headroom_bytes or 0) <= (greater.headroom_bytes or 0)


@given(segments())
def test_memory_of_private_pools_is_reported_separately(snapshot: list[SegmentInfo]) -> None:
    """Memory of CUDA graphs and MemPools counts only in the private fields, and all of it does."""
    layout = measure(snapshot, 0, 1.0)
    private = [info for info in snapshot if info["segment_pool_id"] != (0, 0)]

    assert (
        sum(info["total_size"] for info in private)
        == layout.private_used_bytes + layout.private_free_bytes
    )
    assert layout.segments
    assert len(snapshot) - len(private) == layout.segments.total


@given(segments())
def test_segments_of_other_devices_are_ignored(snapshot: list[SegmentInfo]) -> None:
    """The segments of device 0 do not count for device 1."""
    layout = measure(snapshot, 1, 1.0)

    assert layout.segments
    assert (layout.segments.total, layout.free_bytes, layout.fragmentation_ratio) == (0, 0, None)


@given(st.integers(0, 10**9), st.integers(1, 10**9), st.sampled_from([2 * MIB, 20 * MIB]))
def test_full_pages_lie_inside_the_block(offset: int, size: int, page: int) -> None:
    """`full_pages` counts the pages whose first and last byte lie in the block."""
    inside = sum(
        page
        for start in range(offset // page * page, offset + size, page)
        if offset <= start <= offset + size - page
    )

    assert inside == full_pages(offset, size, page)


def test_whole_free_segments_are_not_stranded() -> None:
    """Two free segments give a ratio of 0.5 and no stranded bytes."""
    snapshot = [
        segment(1 << 40, "large", [(64 * MIB, "inactive")]),
        segment(2 << 40, "large", [(64 * MIB, "inactive")]),
    ]

    layout = measure(snapshot, 0, 1.0, AvailableMemory(10 * MIB))

    assert (
        layout.fragmentation_ratio,
        layout.releasable_bytes,
        layout.stranded_bytes,
    ) == (0.5, 128 * MIB, 0)
    assert (layout.headroom_bytes, layout.headroom_flush_bytes) == (64 * MIB, 138 * MIB)


def test_a_live_block_strands_its_neighbors() -> None:
    """A small live tensor in the middle of a segment strands both halves, even with a flush."""
    blocks = [(100 * MIB, "inactive"), (4 * MIB, "active_allocated"), (96 * MIB, "inactive")]

    layout = measure([segment(1 << 40, "large", blocks)], 0, 1.0, AvailableMemory(0))

    assert (layout.stranded_bytes, layout.releasable_bytes) == (196 * MIB, 0)
    assert (layout.headroom_bytes, layout.headroom_flush_bytes) == (100 * MIB, 100 * MIB)


def test_free_blocks_of_another_stream_do_not_count_as_headroom() -> None:
    """A free segment of another stream serves the main stream only after a flush."""
    side = segment(1 << 40, "large", [(50 * MIB, "inactive")], stream=7)
    main = segment(2 << 40, "large", [(20 * MIB, "active_allocated")])

    layout = measure([side, main], 0, 1.0, AvailableMemory(0))

    assert (layout.headroom_bytes, layout.headroom_flush_bytes) == (0, 50 * MIB)


def test_the_memory_fraction_limits_the_headroom() -> None:
    """With a limit, headroom is at most what remains below it."""
    layout = measure(
        [], 0, 1.0, AvailableMemory(driver_free=40 * GIB, reserved=3 * GIB, limit=5 * GIB)
    )

    assert layout.headroom_bytes == 2 * GIB


def test_a_flush_waits_for_pending_blocks() -> None:
    """A segment that becomes free counts as releasable; a block in a split segment serves no one.

    The allocator does not search its blocks again after it has waited for the streams.
    """
    used, waiting, free = "active_allocated", "active_pending_free", "inactive"
    whole = segment(1 << 40, "large", [(30 * MIB, waiting), (10 * MIB, free), (20 * MIB, waiting)])
    split = segment(2 << 40, "large", [(200 * MIB, waiting), (2 * MIB, used)])
    layout = measure([whole, split], 0, 1.0, AvailableMemory(16 * MIB))

    assert (layout.headroom_bytes, layout.headroom_flush_bytes) == (16 * MIB, 76 * MIB)
    assert (layout.pending_free_bytes, layout.releasable_bytes) == (250 * MIB, 0)


def test_a_flush_waits_for_pending_pages() -> None:
    """Of an expandable segment, the full pages in blocks that become free count as releasable."""
    used, waiting, free = "active_allocated", "active_pending_free", "inactive"
    blocks = [(20 * MIB, used), (50 * MIB, waiting), (30 * MIB, free)]
    info = segment(1 << 40, "large", blocks, is_expandable=True)
    config = AllocatorConfig(expandable_segments=True)
    layout = measure([info], 0, 1.0, AvailableMemory(0), config)

    assert (layout.headroom_bytes, layout.headroom_flush_bytes) == (30 * MIB, 80 * MIB)
