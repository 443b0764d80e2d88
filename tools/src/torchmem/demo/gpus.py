"""The demo's simulated GPUs, one per rank: their memory, and how busy the ranks keep them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_uint64
from dataclasses import dataclass
from multiprocessing.context import SpawnContext

from torchmem.demo.node import VERSIONS, SimulatedNode
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.sample.sample import MAX_PID
from torchmem.simulator.gpu import Cells, GpuUse
from torchmem.simulator.scenarios import Scenario

STEP_SECONDS = 0.2
EVENTS_PER_STEP = 4
# Pids of simulated neighbors, which Linux does not assign.
FIRST_NEIGHBOR_PID = MAX_PID
MIN_WINDOW_SECONDS = 1.0
_LEVEL_STEPS = 20


@dataclass(frozen=True, slots=True)
class RankGpu:
    """Shared between a rank's process and the demo: its GPU's memory, and its work in one cell."""

    use: GpuUse
    events: Cells

    def count_event(self) -> None:
        """Count one more event of the scenario, for which the GPU was busy."""
        self.events[0] += 1


class SharedGpus:
    """One GPU per rank. Shared memory holds the bytes that each process on a GPU uses.

    `clock` returns seconds. One more GPU is in MIG mode; no rank uses it.
    """

    def __init__(
        self,
        scenario: Scenario,
        ranks: int,
        context: SpawnContext,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cells = [context.Array(c_uint64, 1 + scenario.neighbors) for _ in range(ranks)]
        self._events = [context.Array(c_uint64, 1) for _ in range(ranks)]
        self._counted = [0] * ranks
        self._node = SimulatedNode(ranks, seed, total_bytes=scenario.gpu_bytes, mig=True)
        self._nvml = FakeNvml(self._gpus, VERSIONS)
        self._clock = clock
        self._started = clock()
        self._measured_at = self._reported_at = 0.0
        self.pids: dict[int, int] = {}

    def clear(self) -> None:
        """Set the use of every GPU to 0."""
        for cells in self._cells:
            cells[:] = [0] * len(cells)

    def use(self, rank: int) -> RankGpu:
        """Return the rank's view of its GPU."""
        cells = self._cells[rank]
        return RankGpu(GpuUse(cells=cells, slot=0, lock=cells.get_lock()), self._events[rank])

    def release(self, rank: int) -> None:
        """Free the memory of a rank whose process has ended, as the driver does."""
        self._cells[rank][0] = 0

    def nvml(self) -> FakeNvml:
        """Return an NVML with these GPUs and the processes in `pids` (pid by rank)."""
        return self._nvml

    def _gpus(self) -> Sequence[FakeGpu]:
        now = self._clock() - self._started
        if now >= self._measured_at + MIN_WINDOW_SECONDS:
            self._measure(now)
        for event in self._node.events(self._reported_at, now):
            self._nvml.subscriptions[-1].coming.put(event)
        self._reported_at = now
        return self._node.gpus(now, [self._processes(rank) for rank in range(len(self._cells))])

    def _measure(self, now: float) -> None:
        """Record the share of the time since the last measurement in which each rank worked."""
        events = [cell[0] for cell in self._events]
        most = (now - self._measured_at) * EVENTS_PER_STEP / STEP_SECONDS
        for rank, activity in enumerate(self._node.activities):
            level = min(1.0, (events[rank] - self._counted[rank]) / most)
            # Rounded, because the activity remembers each change.
            activity.change(self._measured_at, round(level * _LEVEL_STEPS) / _LEVEL_STEPS)
        self._counted, self._measured_at = events, now

    def _processes(self, rank: int) -> Mapping[int, int]:
        """Return the bytes of the rank and of its neighbors by pid, without those that use none."""
        neighbors = range(FIRST_NEIGHBOR_PID + 1, FIRST_NEIGHBOR_PID + len(self._cells[rank]))
        sizes = zip([self.pids.get(rank), *neighbors], self._cells[rank][:], strict=True)
        return {pid: size for pid, size in sizes if pid and size}
