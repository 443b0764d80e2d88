"""The simulated driver, used by one process and by several."""

from __future__ import annotations

import multiprocessing
from ctypes import c_uint64
from multiprocessing.sharedctypes import SynchronizedArray

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.simulator.card import CardUse, SimulatedCard

TOTAL = 100 * MIB


def test_the_context_and_every_segment_count() -> None:
    """Free bytes are the total minus the context and the segments in use."""
    card = SimulatedCard(TOTAL, context_bytes=10 * MIB)
    address = card.cuda_malloc(40 * MIB)
    assert (50 * MIB, TOTAL) == card.mem_get_info()
    assert address is not None
    card.cuda_free(address)
    assert (90 * MIB, TOTAL) == card.mem_get_info()


def test_the_driver_refuses_only_what_does_not_fit() -> None:
    """cudaMalloc returns the last byte, and no more."""
    card = SimulatedCard(TOTAL, context_bytes=0)
    assert card.cuda_malloc(TOTAL + 1) is None
    assert card.cuda_malloc(TOTAL) is not None
    assert card.cuda_malloc(1) is None


def test_segments_do_not_overlap() -> None:
    """Segments never overlap, and no address is reused."""
    card = SimulatedCard(TOTAL, context_bytes=0)
    first = card.cuda_malloc(3 * MIB)
    second = card.cuda_malloc(3 * MIB)
    assert first is not None
    assert second is not None
    assert second >= first + 3 * MIB
    card.cuda_free(first)
    assert card.cuda_malloc(3 * MIB) not in (first, second)


def test_a_full_card_has_no_room_for_a_context() -> None:
    """A process without room for its context gets an error."""
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        SimulatedCard(TOTAL, context_bytes=TOTAL + 1)


def hold(cells: SynchronizedArray[int]) -> None:
    """Use 30 MiB in a second process, and end without freeing them."""
    SimulatedCard(
        TOTAL, context_bytes=10 * MIB, use=CardUse(cells, 1, cells.get_lock())
    ).cuda_malloc(20 * MIB)


def test_processes_share_a_card() -> None:
    """Memory of another process is not free here, until its cell is reset."""
    context = multiprocessing.get_context("spawn")
    cells = context.Array(c_uint64, 2)
    card = SimulatedCard(TOTAL, context_bytes=10 * MIB, use=CardUse(cells, 0, cells.get_lock()))
    process = context.Process(target=hold, args=(cells,))
    process.start()
    process.join(60)
    assert [10 * MIB, 30 * MIB] == cells[:]
    assert card.cuda_malloc(61 * MIB) is None
    assert card.use.own() == 10 * MIB
    cells[1] = 0
    assert card.cuda_malloc(61 * MIB) is not None
