"""The simulator against traces recorded on real GPUs: every allocation lands on the recorded address."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from torchmem.core.sizes import SMALL_SIZE, round_size
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.card import SimulatedCard

Event = dict[str, Any]


class BuiltinsOnly(pickle.Unpickler):
    """Loads data, never code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not a builtin container or number")


class RecordedCard(SimulatedCard):
    """Gives segments the addresses that the real driver gave them."""

    def __init__(self, addresses: list[int]) -> None:
        super().__init__(total_bytes=1 << 50)
        self._addresses = iter(addresses)

    def cuda_malloc(self, size: int) -> int | None:
        return next(self._addresses)


def allocated_before(segments: list[Event], trace: list[Event]) -> dict[int, int]:
    """Address and size of each block in use when the trace began, found by undoing the trace from its end."""
    allocated = {
        block["address"]: block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    for event in reversed(trace):
        if event["action"] == "alloc":
            allocated.pop(event["addr"])
        elif event["action"] == "free_completed":
            allocated[event["addr"]] = round_size(event["size"])
    return allocated


def rebuild(allocator: DeviceCachingAllocator, segment: Event, allocated: dict[int, int]) -> dict[int, Block]:
    """Put one segment with its blocks into the allocator; the blocks in use by address."""
    start, end = segment["address"], segment["address"] + segment["total_size"]
    is_small = segment["segment_type"] == "small"
    pool = allocator._small_blocks if is_small else allocator._large_blocks
    pieces: list[tuple[int, int, bool]] = []
    position = start
    for address in sorted(address for address in allocated if start <= address < end):
        if position < address:
            pieces.append((position, address - position, False))
        pieces.append((address, allocated[address], True))
        position = address + allocated[address]
    if position < end:
        pieces.append((position, end - position, False))
    blocks: list[Block] = []
    for address, size, used in pieces:
        if blocks and not used and not is_small and size <= SMALL_SIZE:
            blocks[-1].size += size  # slack of the block before it: the large pool never splits off so little
        else:
            blocks.append(Block(segment["stream"], size, pool, address, allocated=used))
    for left, right in pairwise(blocks):
        left.next, right.prev = right, left
    for block in blocks:
        if block.allocated:
            allocator._active_blocks.add(block)
        else:
            pool.of_stream(block.stream).insert(block)
    return {block.address: block for block in blocks if block.allocated}


@pytest.mark.parametrize("name", ["training_256", "forward_bf16_128", "forward_fp32_128", "small"])
def test_every_recorded_allocation_lands_on_its_address(name: str, root: Path) -> None:
    """Replaying a real GPU's trace gives each allocation the address that PyTorch gave it."""
    path = root.parent / "shared" / "snapshots" / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"no recorded snapshot at {path}")
    with path.open("rb") as file:
        snapshot = BuiltinsOnly(file).load()
    segments, trace = snapshot["segments"], snapshot["device_traces"][0]
    new_segments = [event["addr"] for event in trace if event["action"] == "segment_alloc"]
    allocator = DeviceCachingAllocator(RecordedCard(new_segments), oldest_segment_first=False)
    allocated = allocated_before(segments, trace)
    live: dict[int, Block] = {}
    for segment in segments:
        if segment["address"] not in new_segments:
            live |= rebuild(allocator, segment, allocated)
    landed, recorded = [], []
    for event in trace:
        if event["action"] == "alloc":
            block = allocator.malloc(event["size"], event["stream"])
            landed.append(block.address)
            recorded.append(event["addr"])
            live[event["addr"]] = block
        elif event["action"] == "free_completed":
            allocator.free(live.pop(event["addr"]))
    assert recorded == landed
    assert recorded
