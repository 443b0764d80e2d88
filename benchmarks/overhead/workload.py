"""An allocator with a given number of blocks: PyTorch's on a GPU or the phantom, or simulated."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchmem.allocator.backend import Backend
from torchmem.allocator.sizes import GIB, MIB
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

# Mostly small tensors, so that 100,000 of them fit on any GPU.
SIZES = {512: 6, 4 << 10: 6, 64 << 10: 4, 256 << 10: 3, 2 * MIB: 1}
# A third is freed again, and free neighbors merge, so there are fewer blocks than tensors.
MADE_PER_BLOCK = 1.02


@dataclass(frozen=True, slots=True)
class Workload:
    """An allocator with `blocks` blocks, which exist as long as `held` does."""

    where: str
    backend: Backend
    blocks: int
    held: list[Any]


def has_cuda() -> bool:
    """Return whether PyTorch can use a GPU here, real or phantom."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def where() -> str:
    """Describe where the figures were measured."""
    if not has_cuda():
        return "the simulator's allocator (no PyTorch with a GPU here)"
    import torch

    gpu = "the phantom GPU" if "PHANTOM_MEMORY" in os.environ else torch.cuda.get_device_name()
    return f"PyTorch {torch.__version__}'s allocator on {gpu}"


def make(blocks: int) -> Workload:
    """Return an allocator with about `blocks` blocks, a third of them free."""
    if has_cuda():
        import torch

        from torchmem.sdk.pytorch.backend import TorchBackend

        held = _fill(blocks, partial(torch.empty, dtype=torch.uint8, device="cuda"), lambda _: None)
        return _workload(TorchBackend(), held)
    allocator = DeviceCachingAllocator(SimulatedGpu(1024 * GIB))
    return _workload(SimulatedBackend([allocator]), _fill(blocks, allocator.malloc, allocator.free))


def _fill(blocks: int, allocate: Callable[[int], Any], free: Callable[[Any], None]) -> list[Any]:
    chance = random.Random(0)  # noqa: S311 - a workload, not a secret
    sizes = chance.choices(list(SIZES), list(SIZES.values()), k=int(blocks * MADE_PER_BLOCK))
    made = [allocate(size) for size in sizes]
    for index in range(0, len(made), 3):
        free(made[index])
        made[index] = None
    return made


def _workload(backend: Backend, held: list[Any]) -> Workload:
    snapshot = backend.memory_snapshot() or []
    return Workload(where(), backend, sum(len(segment["blocks"]) for segment in snapshot), held)
