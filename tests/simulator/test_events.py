"""Blocks that other streams used come back only when those streams have passed."""

from __future__ import annotations

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.card import SimulatedCard
from torchmem.simulator.errors import OutOfMemoryError


def states(allocator: DeviceCachingAllocator) -> list[str]:
    """The states of all blocks."""
    return [
        block["state"] for segment in allocator.memory_snapshot() for block in segment["blocks"]
    ]


def test_a_freed_block_waits_for_the_other_stream(
    allocator: DeviceCachingAllocator, card: SimulatedCard
) -> None:
    """It stays active, and is not given out, until the event is done and the next request looks."""
    block = allocator.malloc(20 * MIB)
    allocator.record_stream(block, 7)
    card.hold_events(True)
    allocator.free(block)
    stats = allocator.memory_stats_as_nested_dict()
    assert (0, 1, ["active_pending_free"]) == (
        stats["allocation"]["all"]["current"], stats["active"]["all"]["current"], states(allocator)
    )  # fmt: skip
    assert allocator.malloc(20 * MIB).address != block.address
    card.hold_events(False)
    assert ["active_pending_free", "active_allocated"] == states(allocator)
    assert allocator.malloc(20 * MIB) is block


def test_use_on_its_own_stream_needs_no_event(
    allocator: DeviceCachingAllocator, card: SimulatedCard
) -> None:
    """Recording the stream on which a block was allocated changes nothing."""
    card.hold_events(True)
    block = allocator.malloc(20 * MIB, stream=7)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert ["inactive"] == states(allocator)


def test_a_block_waits_for_every_stream(
    allocator: DeviceCachingAllocator, card: SimulatedCard
) -> None:
    """With two other streams there are two events, however often each was recorded."""
    block = allocator.malloc(20 * MIB)
    for stream in (1, 2, 1):
        allocator.record_stream(block, stream)
    card.hold_events(True)
    allocator.free(block)
    assert 2 == block.event_count


def test_a_retry_waits_for_the_events(
    allocator: DeviceCachingAllocator, card: SimulatedCard
) -> None:
    """When memory is short the allocator waits for the streams, and gives the blocks that became free back."""
    block = allocator.malloc(60 * MIB)
    allocator.record_stream(block, 1)
    card.hold_events(True)
    allocator.free(block)
    assert allocator.malloc(50 * MIB).allocated
    assert 1 == allocator.memory_stats_as_nested_dict()["num_sync_all_streams"]


def test_after_the_wait_the_pool_is_not_searched(
    allocator: DeviceCachingAllocator, card: SimulatedCard
) -> None:
    """A block that the wait frees inside a segment in use does not serve the request that waited, but the next one."""
    pinned, block = allocator.malloc(40 * MIB), allocator.malloc(MIB)
    allocator.free(pinned)
    pinned, waiting = allocator.malloc(10 * MIB), allocator.malloc(30 * MIB)
    allocator.malloc(58 * MIB)
    allocator.record_stream(waiting, 1)
    card.hold_events(True)
    allocator.free(waiting)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(30 * MIB)
    assert allocator.malloc(30 * MIB).address == pinned.address + 10 * MIB
    assert block.allocated
