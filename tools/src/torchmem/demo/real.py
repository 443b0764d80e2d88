"""`torchmem demo --real`: the same scenario with real tensors on this machine's GPUs, as a user's script would."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torchmem import sdk
from torchmem.demo.ranks import Plan, prepare
from torchmem.sample.errors import UsageError
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.scenarios import SCENARIOS

if TYPE_CHECKING:
    import torch

# Below 2 MiB a tensor would move to the small pool and the pattern would be another one.
SMALLEST_BYTES = 2 << 20


class TensorMemory:
    """What a scenario asks of an allocator, answered with tensors; a share of a card plays one of `card_bytes`."""

    def __init__(self, device: torch.device, share: float, card_bytes: int) -> None:
        import torch

        self._torch = torch
        self._device = device
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, card_bytes / total), device)
        self._scale = min(1.0, share * total / card_bytes)
        self._streams = defaultdict(
            lambda: torch.cuda.Stream(device), {0: torch.cuda.default_stream(device)}
        )
        self._live: dict[int, list[torch.Tensor]] = {}

    def malloc(self, size: int, stream: int = 0) -> list[torch.Tensor]:
        """A tensor of `size` bytes that lives until `free`; the list lets `free` drop its last reference."""
        scaled = max(int(size * self._scale), SMALLEST_BYTES)
        with self._torch.cuda.stream(self._streams[stream]):
            holder = [self._torch.empty(scaled, dtype=self._torch.uint8, device=self._device)]
        self._live[id(holder)] = holder
        return holder

    def free(self, holder: list[torch.Tensor]) -> None:
        """Drop the tensor."""
        del self._live[id(holder)]
        holder.clear()

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache`."""
        self._torch.cuda.empty_cache()


def check() -> None:
    """Raises UsageError without PyTorch or without a GPU, before any rank starts."""
    try:
        import torch
    except ModuleNotFoundError:
        raise UsageError(
            "--real needs PyTorch: install it, or run the demo without --real."
        ) from None
    if not torch.cuda.is_available():
        raise UsageError("--real needs a GPU that PyTorch can use: run the demo without --real.")


def real_rank(plan: Plan, rank: int, folder: Path) -> None:
    """One rank's process; ranks share the GPUs in turn, and each keeps to its part of a GPU."""
    prepare(plan, rank, folder)
    import torch

    session = sdk.instrument(run=f"demo-{plan.scenario}")
    count = torch.cuda.device_count()
    neighbours = len(range(rank % count, plan.ranks, count))
    device = torch.device("cuda", rank % count)
    card_bytes = SCENARIOS[plan.scenario].card_bytes
    memory = TensorMemory(device, share=0.95 / neighbours, card_bytes=card_bytes)
    try:
        for moment in plan.train(rank, cast("DeviceCachingAllocator", memory), card_bytes):
            if moment == "step":
                session.step()
    except torch.cuda.OutOfMemoryError as error:
        sys.exit(f"OutOfMemoryError: {error}")
