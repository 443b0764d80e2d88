"""Which processes are ranks, and are published."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from torchmem.allocator.snapshot import NestedStats
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError

MIB = 1 << 20
Opener = Callable[..., Session]
Published = Callable[[], list[dict[str, Any]]]


class Watched(SimulatedBackend):
    """Counts the reads of its statistics."""

    reads = 0

    def memory_stats(self, device: int) -> NestedStats | None:
        self.reads += 1
        return super().memory_stats(device)


def test_a_process_that_only_initialized_cuda_is_no_rank(
    allocator: DeviceCachingAllocator, open_session: Opener, tmp_path: Path
) -> None:
    """However long it lives, it leaves no file and opens no port, and inherits its RANK in vain."""
    backend = Watched([allocator])
    ports = {"port": 0, "textfile": tmp_path / "text"}
    session = open_session(backend, {"RANK": "0"}, interval=0.01, **ports)
    until(lambda: backend.reads > 5)
    url = session.url
    session.close()

    assert url is None
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert sum(session.errors.counts.values()) == 0


def test_its_first_allocation_makes_a_process_a_rank(
    allocator: DeviceCachingAllocator,
    backend: SimulatedBackend,
    open_session: Opener,
    published: Published,
) -> None:
    """It is published within an interval, with its port, before any step."""
    session = open_session(backend, {"RANK": "3"}, interval=0.01, port=0)
    time.sleep(0.05)
    allocator.malloc(MIB)
    until(published)
    until(lambda: session.url)

    assert published()[0]["process"]["rank"] == 3


def fail_to_allocate(_: Session, backend: SimulatedBackend, gpu: DeviceCachingAllocator) -> None:
    """Ask for too much."""
    with pytest.raises(OutOfMemoryError):
        gpu.malloc(1 << 50)


def step(_: Session, backend: SimulatedBackend, gpu: DeviceCachingAllocator) -> None:
    """Step without memory on the GPU."""
    backend.step()


def serve(session: Session, backend: SimulatedBackend, gpu: DeviceCachingAllocator) -> None:
    """Begin to serve a request."""
    session.request().begin()


def free_again(_: Session, backend: SimulatedBackend, gpu: DeviceCachingAllocator) -> None:
    """Allocate, and give everything back to the driver."""
    gpu.free(gpu.malloc(MIB))
    gpu.empty_cache()


@pytest.mark.parametrize("work", [fail_to_allocate, step, serve, free_again])
def test_work_makes_a_process_a_rank(
    work: Callable[..., None],
    allocator: DeviceCachingAllocator,
    backend: SimulatedBackend,
    open_session: Opener,
    published: Published,
) -> None:
    """Also an allocation that fails, a step without GPU memory, and one that is already over."""
    session = open_session(backend)
    work(session, backend, allocator)
    session.close()

    assert len(published()) == 1


class Pluggable(SimulatedBackend):
    """An allocator without statistics, as CUDAPluggableAllocator."""

    def memory_stats(self, device: int) -> NestedStats | None:
        return None


def test_an_allocator_without_statistics_is_published(
    allocator: DeviceCachingAllocator, open_session: Opener, published: Published
) -> None:
    """What the process holds outside of PyTorch's own allocator belongs to a rank."""
    open_session(Pluggable([allocator])).close()

    assert len(published()) == 1


@pytest.mark.parametrize("script", ["compile_worker/__main__.py", "__autotune_main__.py"])
def test_a_process_of_torch_compile_is_never_a_rank(
    script: str,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may allocate to time kernels, and has the rank of the process that waits for it."""
    monkeypatch.setattr(sys, "argv", [f"/env/site-packages/torch/_inductor/{script}", "--parent=1"])
    backend = SimulatedBackend([allocator])
    session = open_session(backend, interval=0.01)
    allocator.malloc(MIB)
    fail_to_allocate(session, backend, allocator)
    session.close()

    assert published() == []
