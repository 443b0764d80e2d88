"""Statistics and snapshots have PyTorch's shape, and resets work like PyTorch's."""

from __future__ import annotations

from typing import Any

from torchmem.allocator.sizes import MIB
from torchmem.allocator.snapshot import BlockInfo, SegmentInfo
from torchmem.simulator.allocator import DeviceCachingAllocator

COUNTS = {"allocation", "segment", "active", "inactive_split"}
BYTES = {"allocated", "reserved", "active", "inactive_split", "requested"}
BY_POOL = COUNTS | {f"{name}_bytes" for name in BYTES}
OVERSIZE = {"oversize_allocations", "oversize_segments"}
COUNTERS = {
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "num_oom_rejections",
    "max_split_size",
}
VALUES = {"current", "peak", "allocated", "freed"}


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, int]:
    """Return `torch.cuda.memory_stats()` of nested statistics: keys joined by dots."""
    flat: dict[str, int] = {}
    for name, value in nested.items():
        flat |= (
            flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat


def test_statistics_have_the_keys_of_pytorch_2_13(allocator: DeviceCachingAllocator) -> None:
    """The nested statistics have PyTorch's 123 numbers under PyTorch's names."""
    nested = allocator.memory_stats_as_nested_dict()
    assert set(nested) == BY_POOL | OVERSIZE | COUNTERS | {"reserved_bytes_by_private_pools"}
    for name in BY_POOL:
        assert set(nested[name]) == {"all", "small_pool", "large_pool"}
        assert all(set(values) == VALUES for values in nested[name].values())
    assert all(set(nested[name]) == VALUES for name in OVERSIZE)
    assert len(flatten(nested)) == 123
    assert nested["max_split_size"] == -1


def test_snapshots_have_the_keys_of_pytorch(allocator: DeviceCachingAllocator) -> None:
    """Segments and blocks have exactly the declared fields; stacks are not simulated."""
    allocator.malloc(3 * MIB)
    (segment,) = allocator.memory_snapshot()
    assert set(segment) == set(SegmentInfo.__annotations__)
    assert all(set(block) == BlockInfo.__required_keys__ for block in segment["blocks"])


def test_a_snapshot_has_pool_stream_and_requested_bytes(
    allocator: DeviceCachingAllocator,
) -> None:
    """Each segment has its pool, its stream, and the requested bytes."""
    allocator.malloc(1000)
    allocator.malloc(3 * MIB + 1, stream=7)
    small, large = allocator.memory_snapshot()
    assert (small["segment_type"], small["stream"]) == ("small", 0)
    assert (small["requested_size"], small["allocated_size"]) == (1000, 1024)
    assert (large["segment_type"], large["stream"]) == ("large", 7)
    assert (large["requested_size"], large["active_size"]) == (3 * MIB + 1, 3 * MIB + 512)


def test_resetting_the_peak(allocator: DeviceCachingAllocator) -> None:
    """After a reset, the peak is the current value, and sums continue."""
    kept, freed = allocator.malloc(20 * MIB), allocator.malloc(30 * MIB)
    allocator.free(freed)
    allocator.reset_peak_memory_stats()
    stats = allocator.memory_stats_as_nested_dict()["allocated_bytes"]["large_pool"]
    assert {
        "current": kept.size,
        "peak": kept.size,
        "allocated": 50 * MIB,
        "freed": 30 * MIB,
    } == stats


def test_resetting_the_sums_also_resets_the_counters(allocator: DeviceCachingAllocator) -> None:
    """After a reset, sums and counters are 0, while current and peak stay."""
    block = allocator.malloc(20 * MIB)
    allocator.empty_cache()
    allocator.reset_accumulated_memory_stats()
    stats = allocator.memory_stats_as_nested_dict()
    assert stats["allocated_bytes"]["all"] == {
        "current": 20 * MIB,
        "peak": 20 * MIB,
        "allocated": 0,
        "freed": 0,
    }
    assert {stats[name] for name in COUNTERS - {"max_split_size"}} == {0}
    allocator.free(block)
    stats = allocator.memory_stats_as_nested_dict()
    assert stats["allocated_bytes"]["all"] == {
        "current": 0,
        "peak": 20 * MIB,
        "allocated": 0,
        "freed": 20 * MIB,
    }
