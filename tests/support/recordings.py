"""Snapshots of jobs on a simulated GPU, as `torch.cuda.memory._dump_snapshot` writes them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmem.allocator.sizes import GIB, MIB, round_size
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import CONTEXT_BYTES, SimulatedGpu
from torchmem.simulator.stats import DeviceStats

# As in py_symbolize: each frame is one dict, which the stacks of all entries share.
FRAMES = [
    {"name": f"forward_{line}", "filename": "/job/model.py", "line": line} for line in range(20)
]
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "release_lock_on_cudamalloc": False,
    "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
}


class _TracedGpu(SimulatedGpu):
    """Records the segments in the trace of a job."""

    def __init__(self, job: RecordedJob, total_bytes: int) -> None:
        super().__init__(total_bytes)
        self._job = job
        self._segment_sizes: dict[int, int] = {}

    def cuda_malloc(self, size: int) -> int | None:
        address = super().cuda_malloc(size)
        if address is not None:
            self._segment_sizes[address] = size
            self._job.record("segment_alloc", address, size)
        return address

    def cuda_free(self, address: int) -> None:
        super().cuda_free(address)
        self._job.record("segment_free", address, self._segment_sizes.pop(address))


class RecordedJob:
    """A job whose allocations are recorded from the first one, as by PyTorch 2.13 with stacks."""

    def __init__(self, gpu_bytes: int = 80 * GIB, device: int = 0) -> None:
        self.device = device
        self.trace: list[dict[str, Any]] = []
        self._allocator = DeviceCachingAllocator(_TracedGpu(self, gpu_bytes), device)
        self._time_us = 1_700_000_000_000_000

    def record(self, action: str, address: int, size: int, **more: int) -> None:
        """Append an entry to the trace."""
        self._time_us += 7
        place = {} if action == "oom" else {"addr": address}
        entry = {
            "action": action,
            **place,
            "size": size,
            "stream": 0,
            "time_us": self._time_us,
            "pool_id": (0, 0),
            "compile_context": "N/A",
            "user_metadata": "",
            "frames": FRAMES[size % 17 : size % 17 + 3],
        }
        self.trace.append(entry | more)

    @property
    def stats(self) -> DeviceStats:
        """The statistics of the allocator."""
        return self._allocator.stats

    def alloc(self, size: int) -> Block | None:
        """Allocate a block; record an OOM and return None if that fails."""
        try:
            block = self._allocator.malloc(size)
        except OutOfMemoryError:
            self.record(
                "oom", 0, round_size(size), device_free=self._allocator.gpu.mem_get_info()[0]
            )
            return None
        self.record("alloc", block.address, size)
        return block

    def free(self, block: Block) -> None:
        """Free a block of `alloc`."""
        self.record("free_requested", block.address, block.requested_size)
        self.record("free_completed", block.address, block.requested_size)
        self._allocator.free(block)

    def segments(self) -> list[dict[str, Any]]:
        """Return the current segments; blocks in use have a stack."""
        segments: list[dict[str, Any]] = [
            dict(segment) for segment in self._allocator.memory_snapshot()
        ]
        for segment in segments:
            segment["frames"] = FRAMES[:2]
            segment["blocks"] = [
                dict(block) | {"frames": _stack(block)} for block in segment["blocks"]
            ]
        return segments

    def snapshot(self) -> dict[str, Any]:
        """Return what `torch.cuda.memory._snapshot()` returns, with this device alone."""
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.device)]
        return {
            "segments": self.segments(),
            "device_traces": [*traces, self.trace],
            "allocator_settings": SETTINGS,
            "external_annotations": [],
        }


def _stack(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [] if block["state"] == "inactive" else FRAMES[:3]


def in_small_pieces(count: int = 30, going: int = 8, staying: int = 12) -> RecordedJob:
    """Return a job that dies of pieces smaller than the pages of expandable segments.

    `going` MiB and `staying` MiB share a segment of 20 MiB, `count` times. By default, smaller
    segments would save it.
    """
    job = RecordedJob(CONTEXT_BYTES + 710 * MIB)
    blocks = [job.alloc(size * MIB) for _ in range(count) for size in (going, staying)]
    for block in filter(None, blocks[::2]):
        job.free(block)
    assert job.alloc(250 * MIB) is None
    return job


def varying_lengths(steps: int = 12, seed: int = 1, gpu_bytes: int = 80 * GIB) -> RecordedJob:
    """Return a job with varying sequence lengths, so that freed blocks seldom fit again.

    It ends at its first OOM, if there is one.
    """
    job, rng = RecordedJob(gpu_bytes), random.Random(seed)
    for size in (96 * MIB, 3 * MIB, 40_000, 300):
        job.alloc(size)
    for _ in range(steps):
        length = rng.randrange(256, 1024)
        activations = [
            job.alloc(length * width) for width in (64 << 10, 48 << 10, 256 << 10, 8 << 10, 100)
        ]
        for block in activations:
            if block is None:
                return job
        for block in reversed(activations):
            if block is not None:
                job.free(block)
    return job


def write(snapshot: object, path: Path, protocol: int = 4) -> Path:
    """Pickle a snapshot as `_dump_snapshot` does."""
    path.write_bytes(pickle.dumps(snapshot, protocol=protocol))
    return path
