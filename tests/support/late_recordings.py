"""Recordings of random programs that begin in the middle of them."""

from __future__ import annotations

import random

from support.allocator_programs import PlainPools, Setting, Simulated
from support.recording_allocator import Placement, RecordingAllocator, RecordingGpu

from torchmem.allocator.settings import LAST_PARSED, AllocatorConfig
from torchmem.simulator.blocks import BlockOrder
from torchmem.trace.recording import Recording

CONF = LAST_PARSED.upper()
ADDRESSES = ("ascending", "descending", "reuse", "random")
OPERATIONS = 600


def late_recording(
    setting: Setting, order: BlockOrder, addresses: str, seed: int, start: float
) -> Recording:
    """Return a random program's history from a share `start` of its events on."""
    gpu = RecordingGpu(setting.gpu, Placement(addresses, seed))
    allocator = RecordingAllocator(gpu, AllocatorConfig.parse(setting.conf), order=order)
    if setting.fraction < 1:
        allocator.set_memory_fraction(setting.fraction)
    simulated = Simulated(setting)
    simulated.allocator = allocator
    simulated.gpu = gpu  # type: ignore[assignment]
    programmer = PlainPools(setting, random.Random(seed))
    for _ in range(OPERATIONS):
        operation = programmer.next()
        programmer.learn(operation, simulated.run(operation))
    events = allocator.events[round(len(allocator.events) * start) :]
    return allocator.recording({CONF: setting.conf}, events)
