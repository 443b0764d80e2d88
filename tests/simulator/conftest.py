"""A small simulated card and its allocator."""

from __future__ import annotations

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.card import SimulatedCard


@pytest.fixture
def card() -> SimulatedCard:
    """Return an empty card of 100 MiB."""
    return SimulatedCard(100 * MIB, context_bytes=0, uuid="GPU-1", name="Small")


@pytest.fixture
def allocator(card: SimulatedCard) -> DeviceCachingAllocator:
    """Return the allocator of that card, as device 0."""
    return DeviceCachingAllocator(card)
