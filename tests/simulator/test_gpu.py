"""The simulated driver, used by one process and by several."""

from __future__ import annotations

import multiprocessing
from ctypes import c_uint64
from multiprocessing.sharedctypes import SynchronizedArray

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.simulator.gpu import GpuUse, SimulatedGpu

TOTAL = 100 * MIB


def test_the_context_and_every_segment_count() -> None:
    """Free bytes are the total minus the context and the segments in use."""
    gpu = SimulatedGpu(TOTAL, context_bytes=10 * MIB)
    address = gpu.cuda_malloc(40 * MIB)
    assert gpu.mem_get_info() == (50 * MIB, TOTAL)
    assert address is not None
    gpu.cuda_free(address)
    assert gpu.mem_get_info() == (90 * MIB, TOTAL)


def test_the_driver_refuses_only_what_does_not_fit() -> None:
    """cudaMalloc returns the last byte, and no more."""
    gpu = SimulatedGpu(TOTAL, context_bytes=0)
    assert gpu.cuda_malloc(TOTAL + 1) is None
    assert gpu.cuda_malloc(TOTAL) is not None
    assert gpu.cuda_malloc(1) is None


def test_no_process_uses_less_than_nothing() -> None:
    """Sizes below zero are refused, and a process cannot free what it does not use."""
    use = GpuUse()
    with pytest.raises(ValueError, match="cannot allocate -1 bytes"):
        use.claim(-1, TOTAL)
    assert use.claim(MIB, TOTAL)
    for size in (-1, MIB + 1):
        with pytest.raises(ValueError, match=f"cannot free {size}"):
            use.release(size)
    assert use.total() == MIB


def test_segments_do_not_overlap() -> None:
    """Segments never overlap, and no address is reused."""
    gpu = SimulatedGpu(TOTAL, context_bytes=0)
    first = gpu.cuda_malloc(3 * MIB)
    second = gpu.cuda_malloc(3 * MIB)
    assert first is not None
    assert second is not None
    assert second >= first + 3 * MIB
    gpu.cuda_free(first)
    assert gpu.cuda_malloc(3 * MIB) not in (first, second)


def test_a_full_gpu_has_no_room_for_a_context() -> None:
    """A process without room for its context gets an error."""
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        SimulatedGpu(TOTAL, context_bytes=TOTAL + 1)


def hold(cells: SynchronizedArray[int]) -> None:
    """Use 30 MiB in a second process, and end without freeing them."""
    SimulatedGpu(TOTAL, context_bytes=10 * MIB, use=GpuUse(cells, 1, cells.get_lock())).cuda_malloc(
        20 * MIB
    )


def test_processes_share_a_gpu() -> None:
    """Memory of another process is not free here, until its cell is reset."""
    context = multiprocessing.get_context("spawn")
    cells = context.Array(c_uint64, 2)
    gpu = SimulatedGpu(TOTAL, context_bytes=10 * MIB, use=GpuUse(cells, 0, cells.get_lock()))
    process = context.Process(target=hold, args=(cells,))
    process.start()
    process.join(60)
    assert cells[:] == [10 * MIB, 30 * MIB]
    assert gpu.cuda_malloc(61 * MIB) is None
    assert gpu.use.own() == 10 * MIB
    cells[1] = 0
    assert gpu.cuda_malloc(61 * MIB) is not None
