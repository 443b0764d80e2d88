"""The demo's simulated cards, one per rank, and an NVML that reports what the processes use."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint64
from multiprocessing.context import SpawnContext

from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.processes import Processes, ProcessMemory
from torchmem.exporter.testing import FakeGpu, FakeNvml
from torchmem.simulator.card import CardUse
from torchmem.simulator.scenarios import Scenario

GIB = 1 << 30
DRIVER_VERSION = "simulated"
# The driver keeps 1/128 of a card for itself (640 MiB of 80 GiB): used + free + reserved = total.
DRIVER_SHARE = 128
# Pids of simulated neighbors. Linux assigns no pid from PID_MAX_LIMIT on.
FIRST_NEIGHBOR_PID = 1 << 22


def uuid(rank: int) -> str:
    """Return the UUID of the rank's card; it reads as "simulated"."""
    return f"GPU-51e0de70-0000-4000-8000-{rank:012d}"


def card_name(scenario: Scenario) -> str:
    """Return the product name that NVML reports for a card of this scenario."""
    return f"Simulated {round(scenario.card_bytes / GIB)} GB"


def cuda_bytes(scenario: Scenario) -> int:
    """Return how many bytes of a card CUDA can allocate."""
    return scenario.card_bytes - scenario.card_bytes // DRIVER_SHARE


class Cards:
    """One card per rank. Shared memory holds the bytes that each process on a card uses."""

    def __init__(self, scenario: Scenario, ranks: int, context: SpawnContext) -> None:
        self._scenario = scenario
        self._cells = [context.Array(c_uint64, 1 + scenario.neighbors) for _ in range(ranks)]
        self.pids: dict[int, int] = {}

    def clear(self) -> None:
        """Set the use of every card to 0."""
        for cells in self._cells:
            cells[:] = [0] * len(cells)

    def use(self, rank: int) -> CardUse:
        """Return the rank's view of its card."""
        cells = self._cells[rank]
        return CardUse(cells=cells, slot=0, lock=cells.get_lock())

    def release(self, rank: int) -> None:
        """Free the memory of a rank whose process has ended, as the driver does."""
        self._cells[rank][0] = 0

    def nvml(self) -> FakeNvml:
        """Return an NVML with these cards and the processes in `pids` (pid by rank)."""
        return FakeNvml(self._gpus)

    def _gpus(self) -> Sequence[FakeGpu]:
        return [self._gpu(rank, cells[:]) for rank, cells in enumerate(self._cells)]

    def _gpu(self, rank: int, cells: Sequence[int]) -> FakeGpu:
        total, capacity, used = self._scenario.card_bytes, cuda_bytes(self._scenario), sum(cells)
        neighbors = (FIRST_NEIGHBOR_PID + slot for slot in range(1, len(cells)))
        pids = [self.pids.get(rank), *neighbors]
        identity = GpuIdentity(
            index=rank,
            uuid=uuid(rank),
            name=card_name(self._scenario),
            pci_bus_id=f"00000000:{rank + 1:02X}:00.0",
            driver_version=DRIVER_VERSION,
        )
        memory = MemoryInfo(total, used, free=capacity - used, reserved=total - capacity)
        listed = [
            ProcessMemory(pid, size) for pid, size in zip(pids, cells, strict=True) if pid and size
        ]
        return FakeGpu(identity, memory, Processes(listed, memory=memory))
