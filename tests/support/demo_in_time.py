"""The demo in simulated time: what the page shows of each rank, in a few seconds for all scenarios.

The GPUs are the demo's own, the exporter reads them, and the page's state is made of both sides.
The SDK's recorder reads as often as in the demo.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, cached_property
from multiprocessing import get_context
from pathlib import Path

from support.simulated_time import RANKS, Pace, Rank

from torchmem.demo.gpus import EVENTS_PER_STEP, STEP_SECONDS, SharedGpus
from torchmem.demo.node import cuda_bytes, uuid
from torchmem.explain.remedy import Remedy
from torchmem.explain.threats import Threat, advice, threats
from torchmem.explain.thresholds import defaults
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import Nvml
from torchmem.exporter.live.state import node_state
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.host.process_table import process_key
from torchmem.node.published import Published
from torchmem.node.state import NodeState
from torchmem.sample.sample import LIVE_STATES, DeviceSample, Sample, State
from torchmem.sdk.reading.run_history import EARLY_STEPS
from torchmem.simulator.backend import SimulatedOptimizer
from torchmem.simulator.scenarios import SCENARIOS

SECONDS = 100.0
EVERY_SECONDS = 2.5
SNAPSHOT_SECONDS = 4.0
"""Shorter than in the demo, as the run is."""
READ_STEPS = 5
"""The SDK reads once a second, which is every fifth step of the demo."""
LIMITS = defaults().limits("demo", "node1")


@dataclass(frozen=True, slots=True)
class Look:
    """What is shown at one moment: the page's state, what NVML says, and what the SDK published.

    `memory`: NVML's of each GPU, also of the one that no rank uses. `used`: what the rank's process
    has of its GPU, of which its allocator has `reserved`; the sample may be older.
    """

    at: float
    state: State
    sample: Sample
    page: NodeState
    memory: tuple[MemoryInfo, ...]
    used: int
    reserved: int

    @property
    def device(self) -> DeviceSample:
        """The only device of the rank."""
        (device,) = self.sample.devices
        return device

    @property
    def threats(self) -> tuple[Threat, ...]:
        """What is said about the rank, in order."""
        return threats(self.sample, self.device, LIMITS)

    @property
    def advice(self) -> tuple[Remedy, ...]:
        """What it is told to do, in order."""
        return advice(self.sample, self.device, LIMITS)


class _DemoRank(Rank):
    """Keeps a `Look` of each moment instead of series."""

    def attach(self, gpus: SharedGpus, exporter: Exporter, nvml: Nvml) -> list[Look]:
        """Read these GPUs from now on; return the list of what is seen."""
        self._gpus, self._exporter, self._nvml_source = gpus, exporter, nvml
        self._gpus.pids[self.rank] = self.pid
        self._looks: list[Look] = []
        return self._looks

    @property
    def uuid(self) -> str:
        """The UUID of the demo's GPU."""
        return uuid(self.rank)

    @cached_property
    def _optimizer(self) -> SimulatedOptimizer:
        return SimulatedOptimizer(self.simulated.weights)

    def end_step(self) -> None:
        """Read as the SDK does: each of the first steps, then once a second."""
        if self.steps <= EARLY_STEPS or self.steps % READ_STEPS == 0:
            self.recorder.components.see(self._optimizer)
            super().end_step()

    def look(self, published: Sample, state: State) -> None:
        """Collect from the exporter, and make the page's state of what it found."""
        self._exporter.collect()
        found = self._exporter.found()
        device = published.devices[0]
        used = self.gpu.use.own()
        is_live = state in LIVE_STATES
        stats = self.allocator.memory_stats_as_nested_dict()
        reserved = stats["reserved_bytes"]["all"]["current"] if is_live else 0
        outside = {(device.uuid or "", process_key(published.process)): used - reserved}
        item = Published(published, self.pid, state, attributed=is_live)
        found = replace(found, time=self.now, published=[item], outside=outside if is_live else {})
        memory = tuple(value for _, value in found.reading.values(MemoryInfo))
        page = node_state(found)
        self._looks.append(Look(self.now, state, published, page, memory, used, reserved))


@cache
def looks(
    scenario: str, rank: int, seconds: float = SECONDS, every: float = EVERY_SECONDS
) -> list[Look]:
    """Play one of two ranks as `torchmem demo --ranks 2 --duration SECONDS` does."""
    return list(_looks(scenario, rank, seconds, every))


def _looks(name: str, rank: int, seconds: float, every: float) -> Iterator[Look]:
    scenario = SCENARIOS[name]
    now = [0.0]
    gpus = SharedGpus(scenario, RANKS, get_context("spawn"), clock=lambda: now[0])
    pace = Pace(seconds, seconds, STEP_SECONDS / EVENTS_PER_STEP, every, SNAPSHOT_SECONDS)
    player = _DemoRank(
        scenario,
        rank,
        pace,
        planned_steps=round(seconds / STEP_SECONDS),
        capacity=cuda_bytes(scenario.gpu_bytes),
        use=gpus.use(rank).use,
    )
    exporter = Exporter(gpus.nvml(), RunDirectory(Path("absent")), clock=lambda: player.now)
    with closing(exporter):
        seen = player.attach(gpus, exporter, gpus.nvml())
        player.play()
    yield from seen
