"""Headroom under different settings; tests/allocator_tier/test_modes.py uses the real allocator."""

from __future__ import annotations

from support.snapshots import segment

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.headroom import AvailableMemory, CachedFree, headroom, segment_request
from torchmem.allocator.settings import DEFAULT_CONFIG, AllocatorConfig
from torchmem.allocator.sizes import GIB, MIB


def test_requests_that_a_new_segment_serves() -> None:
    """Below 10 MiB only a small segment of 2 MiB fits; above, segments are multiples of 2 MiB."""
    sizes = [0, 1 * MIB, 2 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 25 * MIB]

    assert [segment_request(size, DEFAULT_CONFIG) for size in sizes] == [
        0,
        0,
        MIB,
        MIB,
        10 * MIB,
        10 * MIB,
        24 * MIB,
    ]


def test_a_rounded_request_counts_with_its_segment() -> None:
    """With 2 divisions, 11 MiB would serve 8 MiB, but such a request needs a 20 MiB segment."""
    config = AllocatorConfig(roundup_power2_divisions=(2,) * 16)

    assert [segment_request(size * MIB, config) for size in (11, 22)] == [MIB, 16 * MIB]


def test_a_large_block_serves_no_small_request() -> None:
    """No request uses a large-pool block of up to 1 MiB; such requests go to the small pool."""
    assert headroom(CachedFree(0, MIB, 0), AvailableMemory(0), DEFAULT_CONFIG, flush=False) == 0


def test_oversize_blocks_serve_only_oversize_requests() -> None:
    """A block does not count if the largest request for it is too small for an oversize block."""
    config = AllocatorConfig(
        max_split_size=100 * MIB, roundup_power2_divisions=(1,) * 4 + (2,) * 12
    )

    assert (
        headroom(CachedFree(0, 140 * MIB, 0), AvailableMemory(0), config, flush=False) == 128 * MIB
    )
    assert headroom(CachedFree(0, 190 * MIB, 0), AvailableMemory(0), config, flush=False) == 0


def test_throwing_before_the_flush_excludes_the_cache() -> None:
    """With throw_on_cudamalloc_oom, the allocator raises an error before it empties its cache."""
    config = AllocatorConfig(throw_on_cudamalloc_oom=True)
    cached = CachedFree(0, 0, 500 * MIB)

    assert [
        headroom(cached, AvailableMemory(100 * MIB), c, flush=True)
        for c in (config, DEFAULT_CONFIG)
    ] == [100 * MIB, 600 * MIB]


def test_expandable_segments_grow_into_the_first_gap_that_is_long_enough() -> None:
    """A gap between two ranges is used first if it can hold the request."""
    config = AllocatorConfig(expandable_segments=True)
    used, free = "active_allocated", "inactive"
    first = segment(1 << 40, "large", [(16 * MIB, used), (4 * MIB, free)], is_expandable=True)

    def headroom_with(gap: int) -> int | None:
        start = (1 << 40) + 20 * MIB + gap
        last = segment(start, "large", [(10 * MIB, used), (10 * MIB, free)], is_expandable=True)
        return measure([first, last], 0, 1.0, AvailableMemory(45 * MIB), config).headroom_bytes

    assert [headroom_with(gap) for gap in (20 * MIB, 80 * MIB)] == [50 * MIB, 44 * MIB]


def test_headroom_is_unknown_without_the_settings() -> None:
    """Headroom is None if the settings are unknown or expandable segments were disabled later."""
    left_over = [segment(1 << 40, "large", [(20 * MIB, "inactive")], is_expandable=True)]
    unknown = AllocatorConfig.of({"backend": "native"})

    available = AvailableMemory(GIB)
    assert measure([], 0, 1.0, available, unknown).headroom_bytes is None
    assert measure(left_over, 0, 1.0, available).headroom_bytes is None
