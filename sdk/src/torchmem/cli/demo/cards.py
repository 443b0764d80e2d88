"""The demo's simulated cards: one for each rank, and an NVML that answers what the ranks really hold."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint64
from multiprocessing.context import SpawnContext

from torchmem.exporter.gpu import GpuIdentity, MemoryInfo, ProcessMemory
from torchmem.exporter.testing import FakeGpu, FakeNvml
from torchmem.simulator.card import CARD_BYTES, CardUse

MIB = 1 << 20
CARD_NAME = "Simulated 80 GB"
DRIVER_VERSION = "simulated"
# What the driver keeps for itself on such cards, so that used + free + reserved = total.
DRIVER_RESERVED_BYTES = 640 * MIB
CUDA_TOTAL_BYTES = CARD_BYTES - DRIVER_RESERVED_BYTES


def uuid(rank: int) -> str:
    """A UUID that says what it is."""
    return f"GPU-51e0de70-0000-4000-8000-{rank:012d}"


class Cards:
    """One card for each rank, shared with the rank's process through a cell that holds the bytes in use."""

    def __init__(self, ranks: int, context: SpawnContext) -> None:
        self._cells = [context.Array(c_uint64, 1) for _ in range(ranks)]
        self.pids: dict[int, int] = {}

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
        return [self._gpu(rank, int(cells[0])) for rank, cells in enumerate(self._cells)]

    def _gpu(self, rank: int, used: int) -> FakeGpu:
        holders = [ProcessMemory(pid=self.pids[rank], used_bytes=used)] if used and rank in self.pids else []
        return FakeGpu(
            GpuIdentity(
                index=rank, uuid=uuid(rank), name=CARD_NAME, pci_bus_id=f"00000000:{rank + 1:02X}:00.0",
                driver_version=DRIVER_VERSION,
            ),
            memory=MemoryInfo(
                total=CARD_BYTES, used=used, free=CUDA_TOTAL_BYTES - used, reserved=DRIVER_RESERVED_BYTES
            ),
            processes=holders,
        )  # fmt: skip
