"""What an event of the simulated allocator executes: a check that needs no clock."""

from __future__ import annotations

from random import Random

from support.bytecodes import allowed, bytecodes

from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.gpu import SimulatedGpu

PER_EVENT = {(3, 10): 551, (3, 11): 559, (3, 12): 521, (3, 13): 505}
LIVE, EVENTS = 100, 600


def program() -> None:
    """Allocate and free, with about 100 blocks in use."""
    allocator, chance = DeviceCachingAllocator(SimulatedGpu()), Random(0)
    slots: list[Block | None] = [None] * LIVE
    for _ in range(EVENTS // 2):
        slot = chance.randrange(LIVE)
        old = slots[slot]
        if old is not None:
            allocator.free(old)
        slots[slot] = allocator.malloc(chance.randrange(1, 8 * MIB))


def test_an_event() -> None:
    """Requests and frees execute no more than a tenth more bytecodes than recorded."""
    limit = allowed(PER_EVENT)
    assert limit is None or bytecodes(program) // EVENTS <= limit
