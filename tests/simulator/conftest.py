"""A small simulated GPU and its allocator."""

from __future__ import annotations

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.gpu import SimulatedGpu


@pytest.fixture
def gpu() -> SimulatedGpu:
    """Return an empty GPU of 100 MiB."""
    return SimulatedGpu(100 * MIB, context_bytes=0, uuid="GPU-1", name="Small")


@pytest.fixture
def allocator(gpu: SimulatedGpu) -> DeviceCachingAllocator:
    """Return the allocator of that GPU, as device 0."""
    return DeviceCachingAllocator(gpu)
