"""What the SDK publishes of RAPIDS' memory manager; the resources have the methods of RMM 26.10."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

from torchmem.sample.libraries import RmmMemory
from torchmem.sdk.draft import Draft
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.reading.rmm import RmmReader, rmm_memory
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend

MIB = 1 << 20


class CudaMemoryResource:
    """Takes each allocation from the driver, and tells nothing."""


class PoolMemoryResource:
    """A pool of a known size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def pool_size(self) -> int:
        return self._size

    def get_upstream(self) -> CudaMemoryResource:
        return CudaMemoryResource()


class StatisticsResourceAdaptor:
    """Counts what is allocated from another resource."""

    def __init__(self, upstream: object, current: int, peak: int) -> None:
        self._upstream = upstream
        self.allocation_counts = SimpleNamespace(current_bytes=current, peak_bytes=peak)

    def get_upstream(self) -> object:
        return self._upstream


class TrackingResourceAdaptor:
    """Counts what is allocated, without a peak."""

    def get_allocated_bytes(self) -> int:
        return 5

    def get_upstream(self) -> object:
        return CudaMemoryResource()


def test_a_chain_of_resources_tells_pool_use_and_peak() -> None:
    """Each number comes from the resource that has it; where none has it, it is unknown."""
    pool = PoolMemoryResource(100)

    def read(resource: object) -> RmmMemory | None:
        return rmm_memory(resource, serves_pytorch=False)

    assert read(StatisticsResourceAdaptor(pool, 60, 80)) == RmmMemory(100, 60, 80)
    assert read(pool) == RmmMemory(100)
    assert read(StatisticsResourceAdaptor(CudaMemoryResource(), 60, 80)) == RmmMemory(None, 60, 80)
    assert read(TrackingResourceAdaptor()) == RmmMemory(None, 5)
    assert read(CudaMemoryResource()) is None


def modules_with(resource: object) -> dict[str, ModuleType]:
    """Return RMM as imported, with PyTorch's allocator on top of it."""
    rmm, torch_allocator = ModuleType("rmm"), ModuleType("rmm.allocators.torch")
    vars(rmm)["mr"] = SimpleNamespace(get_per_device_resource=lambda _: resource)
    return {"rmm": rmm, "rmm.allocators.torch": torch_allocator}


def published(backend: SimulatedBackend, modules: dict[str, ModuleType]) -> RmmMemory | None:
    """Return what is published after a read."""
    recorder = Recorder(backend)
    recorder.read_settings()
    recorder.read_stats()
    reader = RmmReader(recorder, modules)
    reader.after_read(1)
    draft = Draft(recorder.samples())
    reader.complete(draft)
    (device,) = draft.finished()["devices"]
    memory: RmmMemory | None = device.rmm
    return memory


def test_rmm_beside_pytorch(backend: SimulatedBackend) -> None:
    """A process that uses RMM for something else keeps PyTorch's own allocator."""
    assert published(backend, modules_with(PoolMemoryResource(9))) == RmmMemory(9)


def test_rmm_as_pytorchs_allocator(allocator: DeviceCachingAllocator) -> None:
    """With RMM's allocator in PyTorch, what RMM tells is PyTorch's memory."""

    class Pluggable(SimulatedBackend):
        def allocator_settings(self) -> dict[str, str]:
            return {"backend": "pluggable"}

    found = published(Pluggable([allocator]), modules_with(PoolMemoryResource(9)))
    assert found == RmmMemory(9, serves_pytorch=True)


def test_without_rmm_nothing_is_published(backend: SimulatedBackend) -> None:
    """RMM is never imported by the SDK."""
    assert published(backend, {}) is None


def test_a_session_reads_rmm(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Callable[..., Session],
) -> None:
    """The part is in the list, and does nothing where RMM is not used."""
    session = open_session(backend)
    allocator.malloc(8 * MIB)
    session.step()

    assert session.lifetime.monitor.sample().devices[0].rmm is None
