"""The demo's simulated cards: one for each rank, and an NVML that answers what the processes on them really hold."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint64
from multiprocessing.context import SpawnContext

from torchmem.exporter.gpu import GpuIdentity
from torchmem.exporter.testing import FakeGpu, FakeNvml
from torchmem.exporter.values import MemoryInfo, ProcessMemory
from torchmem.simulator.card import CardUse
from torchmem.simulator.scenarios import Scenario

GIB = 1 << 30
DRIVER_VERSION = "simulated"
# What the driver keeps for itself, so that used + free + reserved = total: 640 MiB of 80 GiB.
DRIVER_SHARE = 128
# Neighbours are no processes of this machine: they count from where Linux's pids end (PID_MAX_LIMIT).
FIRST_NEIGHBOUR_PID = 1 << 22


def uuid(rank: int) -> str:
    """A UUID that says what it is."""
    return f"GPU-51e0de70-0000-4000-8000-{rank:012d}"


def card_name(scenario: Scenario) -> str:
    """A name that says what it is."""
    return f"Simulated {round(scenario.card_bytes / GIB)} GB"


def cuda_bytes(scenario: Scenario) -> int:
    """Bytes that CUDA has to give on a card of this scenario."""
    return scenario.card_bytes - scenario.card_bytes // DRIVER_SHARE


class Cards:
    """One card for each rank, shared with its process through cells that hold the bytes each process on it uses."""

    def __init__(self, scenario: Scenario, ranks: int, context: SpawnContext) -> None:
        self._scenario = scenario
        self._cells = [context.Array(c_uint64, 1 + scenario.neighbours) for _ in range(ranks)]
        self.pids: dict[int, int] = {}

    def clear(self) -> None:
        """Nobody is on any card."""
        for cells in self._cells:
            cells[:] = [0] * len(cells)

    def use(self, rank: int) -> CardUse:
        """The rank's side of its card."""
        cells = self._cells[rank]
        return CardUse(cells=cells, slot=0, lock=cells.get_lock())

    def release(self, rank: int) -> None:
        """The rank's process has ended: its memory goes back, as the driver would do."""
        self._cells[rank][0] = 0

    def nvml(self) -> FakeNvml:
        """An NVML that sees these cards and the processes in `pids` (rank to pid)."""
        return FakeNvml(self._gpus)

    def _gpus(self) -> Sequence[FakeGpu]:
        return [self._gpu(rank, cells[:]) for rank, cells in enumerate(self._cells)]

    def _gpu(self, rank: int, cells: Sequence[int]) -> FakeGpu:
        total, capacity = self._scenario.card_bytes, cuda_bytes(self._scenario)
        pids = [self.pids.get(rank), *(FIRST_NEIGHBOUR_PID + slot for slot in range(1, len(cells)))]
        return FakeGpu(
            GpuIdentity(
                index=rank, uuid=uuid(rank), name=card_name(self._scenario),
                pci_bus_id=f"00000000:{rank + 1:02X}:00.0", driver_version=DRIVER_VERSION,
            ),
            memory=MemoryInfo(
                total=total, used=sum(cells), free=capacity - sum(cells), reserved=total - capacity
            ),
            processes=[ProcessMemory(pid, used) for pid, used in zip(pids, cells, strict=True) if pid and used],
        )  # fmt: skip
