"""`torchmem demo --real`: the same scenario with tensors on this machine's GPUs."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torchmem import sdk
from torchmem.demo.gpus import RankGpu
from torchmem.demo.ranks import DemoPlan, prepare
from torchmem.sample.errors import UsageError
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.scenarios import SCENARIOS

if TYPE_CHECKING:
    import torch

# Smaller tensors could move to the small pool, which would change the scenario's pattern.
MIN_TENSOR_BYTES = 2 << 20


class TensorMemory:
    """The methods of an allocator that scenarios call, implemented with tensors.

    The process uses at most `share` of the device. Sizes are scaled down so that a scenario for
    a GPU of `gpu_bytes` fits into that share.
    """

    def __init__(self, device: torch.device, share: float, gpu_bytes: int) -> None:
        import torch

        self._torch = torch
        self._device = device
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, gpu_bytes / total), device)
        self._scale = min(1.0, share * total / gpu_bytes)
        self._streams = defaultdict(
            lambda: torch.cuda.Stream(device), {0: torch.cuda.default_stream(device)}
        )
        self._live: dict[int, list[torch.Tensor]] = {}

    def malloc(self, size: int, stream: int = 0) -> list[torch.Tensor]:
        """Return a list with one tensor of `size` bytes; `free` clears the list."""
        scaled = max(int(size * self._scale), MIN_TENSOR_BYTES)
        with self._torch.cuda.stream(self._streams[stream]):
            holder = [self._torch.empty(scaled, dtype=self._torch.uint8, device=self._device)]
        self._live[id(holder)] = holder
        return holder

    def free(self, holder: list[torch.Tensor]) -> None:
        """Drop the last reference to the tensor."""
        del self._live[id(holder)]
        holder.clear()

    def empty_cache(self) -> None:
        """Call `torch.cuda.empty_cache`."""
        self._torch.cuda.empty_cache()


def check() -> None:
    """Raise UsageError if PyTorch is not installed or finds no GPU."""
    try:
        import torch
    except ModuleNotFoundError:
        raise UsageError(
            "--real needs PyTorch: install it, or run the demo without --real."
        ) from None
    if not torch.cuda.is_available():
        raise UsageError("--real needs a GPU that PyTorch can use: run the demo without --real.")


def real_rank(plan: DemoPlan, rank: int, folder: Path, _: RankGpu) -> None:
    """Train in one process. Ranks are spread over the GPUs and share each GPU evenly."""
    prepare(plan, rank, folder)
    import torch

    session = sdk.instrument(run=f"demo-{plan.scenario}")
    count = torch.cuda.device_count()
    ranks_on_device = len(range(rank % count, plan.ranks, count))
    device = torch.device("cuda", rank % count)
    gpu_bytes = SCENARIOS[plan.scenario].gpu_bytes
    memory = TensorMemory(device, share=0.95 / ranks_on_device, gpu_bytes=gpu_bytes)
    simulated = plan.simulated(rank, cast("DeviceCachingAllocator", memory), gpu_bytes)
    session.track("weights", lambda: simulated.weights)
    try:
        for event in plan.train(simulated):
            if event == "step":
                session.step()
    except torch.cuda.OutOfMemoryError as error:
        sys.exit(f"OutOfMemoryError: {error}")
