"""The simulated backend behaves like PyTorch's."""

from __future__ import annotations

import pytest

from torchmem.allocator.backend import Backend, Device
from torchmem.allocator.sizes import MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu


def test_it_reads_every_device(allocator: DeviceCachingAllocator) -> None:
    """Devices, statistics, segments and free bytes are those of the allocator with the index."""
    second = DeviceCachingAllocator(SimulatedGpu(50 * MIB, context_bytes=10 * MIB), device=1)
    backend: Backend = SimulatedBackend([allocator, second])
    allocator.malloc(20 * MIB)
    second.malloc(30 * MIB)
    second.set_memory_fraction(0.9)
    assert [Device(0, "GPU-1", "Small", 100 * MIB), Device(1, None, None, 50 * MIB)] == list(
        backend.devices()
    )
    assert [backend.free_bytes(index) for index in (0, 1)] == [80 * MIB, 10 * MIB]
    assert [backend.limit_bytes(index) for index in (0, 1)] == [100 * MIB, 45 * MIB]
    assert second.memory_stats_as_nested_dict() == backend.memory_stats(1)
    assert allocator.memory_snapshot() + second.memory_snapshot() == backend.memory_snapshot()
    assert backend.versions()["torch"] == "simulated"


def test_callbacks_wait_for_cuda(allocator: DeviceCachingAllocator) -> None:
    """A callback runs once: when CUDA is initialized, or at once if it already is."""
    backend = SimulatedBackend([allocator], initialized=False)
    seen: list[str] = []
    backend.on_init(lambda: seen.append("early"))
    assert (seen, backend.is_initialized()) == ([], False)
    backend.init()
    backend.on_init(lambda: seen.append("late"))
    backend.init()
    assert (seen, backend.is_initialized()) == (["early", "late"], True)


def test_step_callbacks_run_until_removed(allocator: DeviceCachingAllocator) -> None:
    """Each step runs every callback once; a callback may remove any callback, even twice."""
    backend = SimulatedBackend([allocator])
    seen: list[str] = []

    def first(_: object) -> None:
        seen.append("first")
        remove()

    backend.on_step(first)
    remove = backend.on_step(lambda _: seen.append("removed"))
    backend.on_step(lambda _: seen.append("last"))
    for _ in range(2):
        backend.step()
    assert seen == ["first", "removed", "last", "first", "last"]


def test_observers_are_called_for_any_device(allocator: DeviceCachingAllocator) -> None:
    """An observer is called with the device that ran out."""
    second = DeviceCachingAllocator(SimulatedGpu(50 * MIB, context_bytes=0), device=1)
    seen: list[tuple[int, ...]] = []
    SimulatedBackend([allocator, second]).on_oom(lambda *args: seen.append(args))
    for full in (allocator, second):
        with pytest.raises(OutOfMemoryError):
            full.malloc(200 * MIB)
    assert seen == [(0, 200 * MIB, 100 * MIB, 100 * MIB), (1, 200 * MIB, 50 * MIB, 50 * MIB)]
