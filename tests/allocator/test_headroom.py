"""Headroom under the allocator's settings; on the real allocator see tests/allocator_tier/test_modes.py."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from support.snapshots import segment

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.headroom import AvailableMemory, CachedFree, headroom, segment_request
from torchmem.allocator.settings import DEFAULT_CONFIG, AllocatorConfig
from torchmem.allocator.sizes import GIB, MIB

NOTHING = CachedFree(0, 0, 0)
divisions = st.lists(st.sampled_from([0, 1, 2, 4, 8, 16]), min_size=16, max_size=16).map(tuple)


def round_size(size: int, config: AllocatorConfig) -> int:
    """Block size of a request, as `DeviceCachingAllocator::round_size` computes it forwards."""
    count = config.roundup_power2_divisions[min(max(size.bit_length() - 21, 0), 15)]
    if count <= 1 or size <= 512 * count:
        return max(512, -(-size // 512) * 512)
    step = (1 << (size.bit_length() - 1)) // count
    return -(-size // step) * step


@given(st.integers(512, 64 * GIB), divisions)
@example(512 * 4, (4,) * 16)
def test_the_largest_request_is_the_largest(block: int, counts: tuple[int, ...]) -> None:
    """It fits into the block after rounding, and one byte more does not."""
    config = AllocatorConfig(roundup_power2_divisions=counts)

    largest = config.largest_request(block)

    assert round_size(largest, config) <= block < round_size(largest + 1, config)


def test_new_segments_follow_their_sizes() -> None:
    """Below 10 MiB only the small pool's 2 MiB segment fits; from there requests round up to 2 MiB."""
    sizes = [0, 1 * MIB, 2 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 25 * MIB]

    assert [0, 0, MIB, MIB, 10 * MIB, 10 * MIB, 24 * MIB] == [
        segment_request(size, DEFAULT_CONFIG) for size in sizes
    ]


def test_rounding_never_promises_a_segment_that_needs_more() -> None:
    """8 MiB is what 11 MiB rounds down to in halves, but it would take a 20 MiB segment."""
    config = AllocatorConfig(roundup_power2_divisions=(2,) * 16)

    assert [MIB, 16 * MIB] == [segment_request(size * MIB, config) for size in (11, 22)]


def test_a_large_block_serves_no_small_request() -> None:
    """A large-pool remnant of 1 MiB or less is for nobody: requests of its size go to the small pool."""
    assert 0 == headroom(CachedFree(0, MIB, 0), AvailableMemory(0), DEFAULT_CONFIG, flush=False)


def test_oversize_blocks_are_kept_for_oversize_requests() -> None:
    """With max_split_size and rounding together, a block that the rounded request may not take does not count."""
    config = AllocatorConfig(
        max_split_size=100 * MIB, roundup_power2_divisions=(1,) * 4 + (2,) * 12
    )

    assert 128 * MIB == headroom(
        CachedFree(0, 140 * MIB, 0), AvailableMemory(0), config, flush=False
    )
    assert 0 == headroom(CachedFree(0, 190 * MIB, 0), AvailableMemory(0), config, flush=False)


def test_refusing_before_the_flush_makes_the_flush_worthless() -> None:
    """With throw_on_cudamalloc_oom the allocator gives up while its cache is still full."""
    config = AllocatorConfig(throw_on_cudamalloc_oom=True)
    cached = CachedFree(0, 0, 500 * MIB)

    assert [100 * MIB, 600 * MIB] == [
        headroom(cached, AvailableMemory(100 * MIB), c, flush=True)
        for c in (config, DEFAULT_CONFIG)
    ]


def test_expandable_segments_grow_where_the_first_gap_is_long_enough() -> None:
    """A gap between two ranges that could hold the request is taken first, though only its beginning is mapped."""
    config = AllocatorConfig(expandable_segments=True)
    used, free = "active_allocated", "inactive"
    first = segment(1 << 40, "large", [(16 * MIB, used), (4 * MIB, free)], is_expandable=True)

    def flushless(gap: int) -> int | None:
        start = (1 << 40) + 20 * MIB + gap
        last = segment(start, "large", [(10 * MIB, used), (10 * MIB, free)], is_expandable=True)
        return measure([first, last], 0, 1.0, AvailableMemory(45 * MIB), config).headroom_bytes

    assert [50 * MIB, 44 * MIB] == [flushless(gap) for gap in (20 * MIB, 80 * MIB)]


def test_headroom_is_unknown_with_the_settings() -> None:
    """Where the version does not tell its settings, or expandable segments were switched off again, nothing is said."""
    left_over = [segment(1 << 40, "large", [(20 * MIB, "inactive")], is_expandable=True)]
    unknown = AllocatorConfig.of({"backend": "native"})

    assert [None, None] == [
        measure(left_over, 0, 1.0, AvailableMemory(GIB)).headroom_bytes, measure([], 0, 1.0, AvailableMemory(GIB), unknown).headroom_bytes
    ]  # fmt: skip


def test_settings_are_read_from_their_text() -> None:
    """The text of a sample becomes bytes and counts; what is missing has PyTorch's default."""
    text = {
        "expandable_segments": "True", "max_split_size": "67108864", "large_segment_size_mb": "40",
        "roundup_power2_divisions": "1:2,32768:4", "throw_on_cudamalloc_oom": "True",
    }  # fmt: skip

    expected = AllocatorConfig(
        expandable_segments=True, max_split_size=64 * MIB, large_segment_size=40 * MIB,
        roundup_power2_divisions=(2, *[0] * 14, 4), throw_on_cudamalloc_oom=True,
    )  # fmt: skip
    assert expected == AllocatorConfig.of(text)
