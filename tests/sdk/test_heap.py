"""The memory of a large snapshot is returned to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from torchmem.allocator.sizes import MIB
from torchmem.host.heap import return_freed_memory
from torchmem.sdk.reading.reader import MANY_BLOCKS, Reader
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.safety.cost import CpuMeter
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.settings import Settings
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu


def resident() -> int:
    """Return the bytes of this process in RAM."""
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    ]
    return int(line.split()[1]) * 1024


def test_freed_memory_is_returned() -> None:
    """Memory that was freed below memory in use does not stay resident."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    before = resident()
    freed = [bytes(2048) for _ in range(20_000)]
    kept = bytes(2048)
    del freed
    return_freed_memory()

    assert resident() - before < 20 * MIB
    assert len(kept) == 2048


@pytest.mark.parametrize(("blocks", "calls"), [(10, 0), (MANY_BLOCKS, 1)])
def test_only_after_a_large_snapshot(blocks: int, calls: int) -> None:
    """The memory is returned once for a large snapshot, when nothing refers to it any more."""
    allocator = DeviceCachingAllocator(SimulatedGpu())
    for _ in range(blocks):
        allocator.malloc(512)
    errors, called = Errors(), []
    recorder = Recorder(SimulatedBackend([allocator]), errors)
    reader = Reader(
        recorder,
        Settings(),
        errors,
        CpuMeter(),
        lambda _: None,
        return_freed_memory=lambda: called.append(True),
    )
    reader.read()
    reader.snapshot_here()
    reader.measure(lambda _: None)
    reader.measure(lambda _: None)

    assert len(called) == calls
    assert sum(errors.counts.values()) == 0
