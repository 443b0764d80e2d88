"""Private pools keep their memory to themselves, as `torch.cuda.MemPool` does."""

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
    """`torch.cuda.use_mem_pool`."""
    allocator.begin_allocate_to_pool(POOL)
    yield
    allocator.end_allocate_to_pool(POOL)
    allocator.release_pool(POOL)


def pools(allocator: DeviceCachingAllocator) -> list[tuple[int, int]]:
    """The pool of each segment."""
    return [segment["segment_pool_id"] for segment in allocator.memory_snapshot()]


def test_its_blocks_serve_nobody_else(allocator: DeviceCachingAllocator) -> None:
    """A free block of the pool serves only requests that go to the pool, and is no part of what a retry gives back."""
    allocator.create_or_incref_pool(POOL)
    with use_mem_pool(allocator):
        block = allocator.malloc(60 * MIB)
    allocator.free(block)
    with pytest.raises(OutOfMemoryError, match=r"with 60\.00 MiB allocated in private pools"):
        allocator.malloc(50 * MIB)
    with use_mem_pool(allocator):
        assert allocator.malloc(60 * MIB) is block
    reserved = allocator.memory_stats_as_nested_dict()["reserved_bytes_by_private_pools"][POOL]
    assert (60 * MIB, 60 * MIB) == (reserved["all"]["current"], reserved["large_pool"]["peak"])


def test_a_pool_without_a_user_gives_its_cache_back(allocator: DeviceCachingAllocator) -> None:
    """After the end of the `MemPool` its free memory goes back at once, and that in use when it is freed."""
    allocator.create_or_incref_pool(POOL)
    with use_mem_pool(allocator):
        kept, freed = allocator.malloc(30 * MIB), allocator.malloc(MIB)
    allocator.free(freed)
    allocator.empty_cache()
    assert [POOL, POOL] == pools(allocator)
    allocator.release_pool(POOL)
    allocator.empty_cache(POOL)
    assert [POOL] == pools(allocator)
    allocator.free(kept)
    allocator.empty_cache()
    assert [] == pools(allocator)
    reserved = allocator.memory_stats_as_nested_dict()["reserved_bytes_by_private_pools"][POOL][
        "all"
    ]
    assert (0, 32 * MIB) == (reserved["current"], reserved["freed"])


def test_only_the_streams_named_go_to_the_pool(allocator: DeviceCachingAllocator) -> None:
    """A route may take the requests of one stream and leave those of the others."""
    allocator.create_or_incref_pool(POOL)
    allocator.begin_allocate_to_pool(POOL, lambda stream: stream == 7)
    allocator.malloc(20 * MIB, stream=7)
    allocator.malloc(20 * MIB)
    assert [POOL, (0, 0)] == pools(allocator)


def test_an_overflow_pool_helps_out(allocator: DeviceCachingAllocator) -> None:
    """With `use_on_oom` its free blocks serve a request for which the driver has nothing."""
    allocator.create_or_incref_pool(POOL, use_on_oom=True)
    with use_mem_pool(allocator):
        block = allocator.malloc(60 * MIB)
    address = block.address
    allocator.free(block)
    assert address == allocator.malloc(50 * MIB).address
    assert 0 == allocator.memory_stats_as_nested_dict()["num_alloc_retries"]


def test_a_pool_without_a_user_helps_nobody(allocator: DeviceCachingAllocator) -> None:
    """Once its `MemPool` is gone, what is free beside a live block of the pool serves no other request."""
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


def test_a_pool_may_refuse_to_split(allocator: DeviceCachingAllocator) -> None:
    """With `no_split` a request gets the whole segment."""
    allocator.create_or_incref_pool(POOL, no_split=True)
    with use_mem_pool(allocator):
        assert 20 * MIB == allocator.malloc(3 * MIB).size


def test_routes_are_opened_and_closed_once(allocator: DeviceCachingAllocator) -> None:
    """A second route to the same pool, or the end of one that is not open, is refused in PyTorch's words."""
    allocator.create_or_incref_pool(POOL)
    allocator.begin_allocate_to_pool(POOL)
    with pytest.raises(ValueError, match="already recording to mempool_id"):
        allocator.begin_allocate_to_pool(POOL)
    allocator.end_allocate_to_pool(POOL)
    with pytest.raises(ValueError, match="not currently recording to mempool_id"):
        allocator.end_allocate_to_pool(POOL)
