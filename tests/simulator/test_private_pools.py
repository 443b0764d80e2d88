"""Private pools keep their memory separate, as `torch.cuda.MemPool` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.errors import OutOfMemoryError

POOL = (0, 1)


@contextmanager
def use_mem_pool(allocator: DeviceCachingAllocator) -> Iterator[None]:
    """Do what `torch.cuda.use_mem_pool` does."""
    allocator.begin_allocate_to_pool(POOL)
    yield
    allocator.end_allocate_to_pool(POOL)
    allocator.release_pool(POOL)


def pools(allocator: DeviceCachingAllocator) -> list[tuple[int, int]]:
    """Return the pool of each segment."""
    return [segment["segment_pool_id"] for segment in allocator.memory_snapshot()]


def test_its_blocks_serve_only_its_requests(allocator: DeviceCachingAllocator) -> None:
    """A free block of a pool serves only requests to the pool, and a retry keeps it."""
    allocator.create_or_incref_pool(POOL)
    with use_mem_pool(allocator):
        block = allocator.malloc(60 * MIB)
    allocator.free(block)
    with pytest.raises(OutOfMemoryError, match=r"with 60\.00 MiB allocated in private pools"):
        allocator.malloc(50 * MIB)
    with use_mem_pool(allocator):
        assert allocator.malloc(60 * MIB) is block
    reserved = allocator.memory_stats_as_nested_dict()["reserved_bytes_by_private_pools"][POOL]
    assert (reserved["all"]["current"], reserved["large_pool"]["peak"]) == (60 * MIB, 60 * MIB)


def test_a_pool_without_users_releases_its_cache(allocator: DeviceCachingAllocator) -> None:
    """After the end of the `MemPool`, its memory is released as soon as it is free."""
    allocator.create_or_incref_pool(POOL)
    with use_mem_pool(allocator):
        kept, freed = allocator.malloc(30 * MIB), allocator.malloc(MIB)
    allocator.free(freed)
    allocator.empty_cache()
    assert pools(allocator) == [POOL, POOL]
    allocator.release_pool(POOL)
    allocator.empty_cache(POOL)
    assert pools(allocator) == [POOL]
    allocator.free(kept)
    allocator.empty_cache()
    assert pools(allocator) == []
    reserved = allocator.memory_stats_as_nested_dict()["reserved_bytes_by_private_pools"][POOL][
        "all"
    ]
    assert (reserved["current"], reserved["freed"]) == (0, 32 * MIB)


def test_a_route_can_be_limited_to_a_stream(allocator: DeviceCachingAllocator) -> None:
    """Requests on other streams go to the default pool."""
    allocator.create_or_incref_pool(POOL)
    allocator.begin_allocate_to_pool(POOL, lambda stream: stream == 7)
    allocator.malloc(20 * MIB, stream=7)
    allocator.malloc(20 * MIB)
    assert pools(allocator) == [POOL, (0, 0)]


def test_an_overflow_pool_serves_other_requests(allocator: DeviceCachingAllocator) -> None:
    """With `use_on_oom`, its free blocks serve a request that the driver refuses."""
    allocator.create_or_incref_pool(POOL, use_on_oom=True)
    with use_mem_pool(allocator):
        block = allocator.malloc(60 * MIB)
    address = block.address
    allocator.free(block)
    assert address == allocator.malloc(50 * MIB).address
    assert allocator.memory_stats_as_nested_dict()["num_alloc_retries"] == 0


def test_an_overflow_pool_without_users_serves_no_request(
    allocator: DeviceCachingAllocator,
) -> None:
    """After the end of its `MemPool`, its free blocks serve no other request."""
    allocator.create_or_incref_pool(POOL, use_on_oom=True)
    with use_mem_pool(allocator):
        allocator.free(allocator.malloc(40 * MIB))
        freed, kept = allocator.malloc(30 * MIB), allocator.malloc(10 * MIB)
    allocator.free(freed)
    allocator.malloc(60 * MIB)
    allocator.release_pool(POOL)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(30 * MIB)
    assert kept.allocated


def test_a_pool_without_splitting(allocator: DeviceCachingAllocator) -> None:
    """With `no_split`, a request gets the whole segment."""
    allocator.create_or_incref_pool(POOL, no_split=True)
    with use_mem_pool(allocator):
        assert allocator.malloc(3 * MIB).size == 20 * MIB


def test_a_route_is_opened_and_closed_once(allocator: DeviceCachingAllocator) -> None:
    """A second route to a pool, or the end of a missing one, raises PyTorch's error."""
    allocator.create_or_incref_pool(POOL)
    allocator.begin_allocate_to_pool(POOL)
    with pytest.raises(ValueError, match="already recording to mempool_id"):
        allocator.begin_allocate_to_pool(POOL)
    allocator.end_allocate_to_pool(POOL)
    with pytest.raises(ValueError, match="not currently recording to mempool_id"):
        allocator.end_allocate_to_pool(POOL)
