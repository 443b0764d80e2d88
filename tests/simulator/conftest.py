"""A small simulated card with PyTorch's allocator on it."""

from __future__ import annotations

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.card import SimulatedCard


@pytest.fixture
def card() -> SimulatedCard:
    """A card of 100 MiB with nothing on it."""
    return SimulatedCard(100 * MIB, context_bytes=0, uuid="GPU-1", name="Small")


@pytest.fixture
def allocator(card: SimulatedCard) -> DeviceCachingAllocator:
    """The allocator of that card, as device 0."""
    return DeviceCachingAllocator(card)
