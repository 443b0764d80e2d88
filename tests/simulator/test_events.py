"""Blocks that other streams used are free only after those streams have finished."""

from __future__ import annotations

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu


def states(allocator: DeviceCachingAllocator) -> list[str]:
    """Return the states of all blocks."""
    return [
        block["state"] for segment in allocator.memory_snapshot() for block in segment["blocks"]
    ]


def test_a_freed_block_waits_for_the_other_stream(
    allocator: DeviceCachingAllocator, gpu: SimulatedGpu
) -> None:
    """The block stays active until its event is complete and the next request checks it."""
    block = allocator.malloc(20 * MIB)
    allocator.record_stream(block, 7)
    gpu.hold_events(True)
    allocator.free(block)
    stats = allocator.memory_stats_as_nested_dict()
    counts = stats["allocation"]["all"]["current"], stats["active"]["all"]["current"]
    assert counts == (0, 1)
    assert states(allocator) == ["active_pending_free"]
    assert allocator.malloc(20 * MIB).address != block.address
    gpu.hold_events(False)
    assert states(allocator) == ["active_pending_free", "active_allocated"]
    assert allocator.malloc(20 * MIB) is block


def test_use_on_its_own_stream_needs_no_event(
    allocator: DeviceCachingAllocator, gpu: SimulatedGpu
) -> None:
    """Recording the stream of the allocation itself changes nothing."""
    gpu.hold_events(True)
    block = allocator.malloc(20 * MIB, stream=7)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert states(allocator) == ["inactive"]


def test_a_block_waits_for_every_stream(
    allocator: DeviceCachingAllocator, gpu: SimulatedGpu
) -> None:
    """Two other streams make two events, however often each was recorded."""
    block = allocator.malloc(20 * MIB)
    for stream in (1, 2, 1):
        allocator.record_stream(block, stream)
    gpu.hold_events(True)
    allocator.free(block)
    assert block.event_count == 2


def test_a_retry_waits_for_the_events(allocator: DeviceCachingAllocator, gpu: SimulatedGpu) -> None:
    """If memory is short, the allocator waits for the streams and releases their blocks."""
    block = allocator.malloc(60 * MIB)
    allocator.record_stream(block, 1)
    gpu.hold_events(True)
    allocator.free(block)
    assert allocator.malloc(50 * MIB).allocated
    assert allocator.memory_stats_as_nested_dict()["num_sync_all_streams"] == 1


def test_after_the_wait_the_pool_is_not_searched(
    allocator: DeviceCachingAllocator, gpu: SimulatedGpu
) -> None:
    """A block in a used segment that the wait frees serves only the next request."""
    pinned, block = allocator.malloc(40 * MIB), allocator.malloc(MIB)
    allocator.free(pinned)
    pinned, waiting = allocator.malloc(10 * MIB), allocator.malloc(30 * MIB)
    allocator.malloc(58 * MIB)
    allocator.record_stream(waiting, 1)
    gpu.hold_events(True)
    allocator.free(waiting)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(30 * MIB)
    assert allocator.malloc(30 * MIB).address == pinned.address + 10 * MIB
    assert block.allocated
