"""Nodes in virtual time: GPUs, the processes on them, and what Prometheus would scrape there."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from docs.generate.pictures.serving import EngineLife, Server
from docs.generate.pictures.training import Life, Trainer
from support.waiting import until

from torchmem.demo.node import VERSIONS, SimulatedNode, cuda_bytes, product_name, uuid
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.directory_status import DirectoryStatus
from torchmem.exporter.prices import GpuPrices
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.dead_processes import DeadProcesses
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.processes import Processes
from torchmem.exporter.subjects.temperature import Temperatures
from torchmem.exporter.subjects.utilization import Utilization
from torchmem.metrics import catalog
from torchmem.node.published import Published
from torchmem.simulator.gpu import GpuUse, SimulatedGpu

GIB = 1 << 30
GPU_BYTES = 80 * GIB
FAILS_AFTER_SECONDS = 5.0
"""How long the other ranks of a job live after one has died: until their next collective fails."""
EPOCH_SECONDS = 1800.0
"""When the defects of a simulated node count from: then they are on a board of the last hour."""
PRICES = GpuPrices({"H100": 2.5})
GPU_IS_LOST = 15
"""NVML_ERROR_GPU_IS_LOST."""
OF_A_LEAN_NODE = (MemoryInfo, Processes, Utilization, Power, Temperatures)

Labels = tuple[tuple[str, str], ...]
"""Name and value of each label, the metric's name among them, in a fixed order."""
Scrape = Mapping[Labels, float]


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process without PyTorch; `level` is the share of time in which it runs kernels."""

    gpu: int
    pid: int
    used_bytes: int
    start: float
    end: float
    level: float = 0.0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node: its GPUs and who uses them; `lives` has the GPU of each process of a rank.

    With `down`, NVML does not answer, for that reason. A `lean` node reports only memory,
    processes, utilization, power and temperatures. `lost` is a GPU and the time from which it is
    lost, `gone` the time from which the exporter does not answer, in Unix seconds.
    """

    instance: str
    gpus: int
    lives: Sequence[tuple[int, Life]] = ()
    others: Sequence[OtherProcess] = ()
    host: int = 0
    healthy: bool = False
    mig: bool = False
    lean: bool = False
    down: str | None = None
    lost: tuple[int, float] | None = None
    gone: float = math.inf


class Node:
    """Plays the processes of a node, and scrapes the real exporter."""

    def __init__(self, plan: NodePlan, start: float) -> None:
        self.plan, self._epoch, self.now = plan, start + EPOCH_SECONDS, start
        # For each GPU, the bytes of each process that ever uses it.
        self._uses: list[list[int]] = [[] for _ in range(plan.gpus)]
        self._cells = [self._add_cell(gpu) for gpu, _ in plan.lives]
        self._other_cells = [self._add_cell(other.gpu) for other in plan.others]
        self._trainers: dict[int, Trainer] = {}
        self._simulated = SimulatedNode(
            plan.gpus, plan.host, mig=plan.mig, healthy=plan.healthy, host=plan.host
        )
        self._nvml = FakeNvml.down(plan.down) if plan.down else FakeNvml(self._gpus, VERSIONS)
        directory = RecordedRunDirectory(self._published)
        # The kernel of this machine does not have the processes of the picture.
        dead = DeadProcesses(gone=lambda _pid: False)
        self.exporter = Exporter(
            self._nvml, directory, clock=lambda: self.now, dead=dead, prices=PRICES
        )

    def play(self, now: float) -> None:
        """Let every process live until `now`."""
        before, self.now = self.now, now
        for number, (gpu, life) in enumerate(self.plan.lives):
            if number not in self._trainers and now >= life.start:
                self._trainers[number] = self._started(number, gpu, life)
        for trainer in self._trainers.values():
            trainer.play(now)
        self._fail_others()
        for cell, other in zip(self._other_cells, self.plan.others, strict=True):
            is_live = other.start <= now < other.end
            self._uses[other.gpu][cell] = other.used_bytes if is_live else 0
        for gpu in range(self.plan.gpus):
            self._simulated.activities[gpu].change(now - self._epoch, self._level(gpu))
        self._deliver_events(before, now)

    def scrape(self) -> Scrape:
        """Return what the exporter exposes now, with the labels that Prometheus adds."""
        target = (("instance", self.plan.instance), ("job", "torchmem"))
        if self.now >= self.plan.gone:
            return {(*target, ("__name__", "up")): 0.0}
        page: dict[Labels, float] = {}
        for metric in self.exporter.collect():
            for sample in metric.samples:
                own = sample.labels.items()
                if "" in sample.labels.values():
                    own = {name: text for name, text in own if text}.items()
                labels = (*own, *target, ("__name__", sample.name))
                page[labels] = sample.value
        _fix_durations(page)
        return page | self._pages_of_programs() | _series_of_target(target, len(page))

    def _pages_of_programs(self) -> dict[Labels, float]:
        """Return what Prometheus scrapes from the programs themselves, by their model."""
        host = self.plan.instance.partition(":")[0]
        return {
            (
                ("instance", f"{host}:8000"),
                ("job", "vllm"),
                ("model_name", trainer.life.run),
                ("__name__", name),
            ): value
            for trainer in self._trainers.values()
            for name, value in trainer.own_page().items()
        }

    def _add_cell(self, gpu: int) -> int:
        self._uses[gpu].append(0)
        return len(self._uses[gpu]) - 1

    def _published(self) -> list[Published]:
        known = (trainer.published(self.now) for trainer in self._trainers.values())
        return [item for item in known if item]

    def _started(self, number: int, gpu: int, life: Life) -> Trainer:
        use = GpuUse(self._uses[gpu], self._cells[number])
        name, capacity = product_name(GPU_BYTES), cuda_bytes(GPU_BYTES)
        simulated = SimulatedGpu(capacity, use=use, uuid=uuid(gpu, self.plan.host), name=name)
        if isinstance(life, EngineLife):
            return Server(life, simulated, local_rank=gpu)
        return Trainer(life, simulated, local_rank=gpu)

    def _fail_others(self) -> None:
        """End the ranks of a job in which one has died."""
        died = {
            (trainer.life.run, trainer.life.start): trainer.ended
            for trainer in self._trainers.values()
            if trainer.state in {"oom", "killed"}
        }
        for trainer in self._trainers.values():
            ended = died.get((trainer.life.run, trainer.life.start))
            if trainer.is_live and ended is not None:
                trainer.end("failed", min(self.now, ended + FAILS_AFTER_SECONDS))

    def _level(self, gpu: int) -> float:
        places = ((place, number) for number, (place, _) in enumerate(self.plan.lives))
        trainers = (self._trainers.get(number) for place, number in places if place == gpu)
        if any(trainer and trainer.is_live for trainer in trainers):
            return 1.0
        others = (other for other in self.plan.others if other.gpu == gpu)
        levels = [other.level for other in others if other.start <= self.now < other.end]
        return max(levels, default=0.0)

    def _gpus(self) -> Sequence[FakeGpu]:
        processes = [self._processes(gpu) for gpu in range(self.plan.gpus)]
        gpus = self._simulated.gpus(self.now - self._epoch, processes)
        if self.plan.lost and self.now >= self.plan.lost[1]:
            gpus[self.plan.lost[0]].error_code = GPU_IS_LOST
        if self.plan.lean:
            return [
                FakeGpu(gpu.identity, *(gpu.values.get(kind) for kind in OF_A_LEAN_NODE))
                for gpu in gpus
            ]
        return gpus

    def _processes(self, gpu: int) -> dict[int, int]:
        """Return the bytes of each process on a GPU by its pid."""
        ranks = (trainer for trainer in self._trainers.values() if trainer.local_rank == gpu)
        used = {trainer.life.pid: trainer.used_bytes for trainer in ranks}
        for cell, other in zip(self._other_cells, self.plan.others, strict=True):
            if other.gpu == gpu:
                used[other.pid] = self._uses[gpu][cell]
        return {pid: size for pid, size in used.items() if size}

    def _deliver_events(self, since: float, now: float) -> None:
        """Report the events of the GPUs, and wait until the exporter's thread has counted them."""
        if not self._nvml.subscriptions:
            return
        for event in self._simulated.events(since - self._epoch, now - self._epoch):
            coming = self._nvml.subscriptions[-1].coming
            coming.put(event)
            until(coming.empty)
            time.sleep(0.01)


class RecordedRunDirectory(RunDirectory):
    """A run directory whose content comes from `published` instead of files."""

    def __init__(self, published: Callable[[], list[Published]]) -> None:
        super().__init__(Path(tempfile.gettempdir()))
        self.status = DirectoryStatus(None, 8 * GIB, 7 * GIB, 1 << 20, (1 << 20) - 100)
        self._published = published

    def read(self, now: float) -> list[Published]:
        """Return what `published` returns."""
        return self._published()


def _fix_durations(page: dict[Labels, float]) -> None:
    """Replace durations of collectors, which were measured on the real clock, by 2 to 8 ms."""
    for labels in page:
        if ("__name__", catalog.COLLECTOR_DURATION.name) in labels:
            page[labels] = Random(str(labels)).uniform(0.002, 0.008)


def _series_of_target(target: Labels, size: int) -> dict[Labels, float]:
    """Return the series that Prometheus itself adds to a scrape of `size` samples."""
    values = {
        "up": 1.0,
        "scrape_duration_seconds": 0.05,
        "scrape_samples_scraped": float(size),
        "scrape_samples_post_metric_relabeling": float(size),
        "scrape_series_added": 0.0,
    }
    return {(*target, ("__name__", name)): value for name, value in values.items()}
