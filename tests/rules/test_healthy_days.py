"""Nodes whose memory is not a card's own fire no alert in a day of healthy training.

The simulated allocator under the SDK's recorder, the SDK's reading of the host's memory over a
fake /proc, the real exporter over a fake NVML, and Prometheus' rule engine. Only time is simulated.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from experiments.quiet_fleet.evaluation import fired
from support.publishing import own_process, publish
from support.simulated_time import Pace, Rank, Series, promtool_values, series_name

from torchmem.allocator.backend import Device
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuIdentity, Versions
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.memory import MemoryInfo, UnifiedMemory
from torchmem.exporter.subjects.processes import Processes, ProcessMemory
from torchmem.exporter.subjects.utilization import Utilization
from torchmem.sample.sample import HostMemory, Sample, State
from torchmem.sdk.pytorch.device_memory import FreeMemory
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import GpuUse
from torchmem.simulator.scenarios import SCENARIOS

MIB, GIB = 1 << 20, 1 << 30
HOUR = 3600.0
DAY = Pace(trained=20 * HOUR, watched=24 * HOUR, event=60.0, scrape=120.0, snapshot=900.0)
CONTEXT = 600 * MIB
HEALTHY = "healthy-slack"


class Node(Rank):
    """A node with one GPU, on which one rank trains; what its neighbors hold changes all day."""

    kind = "card"
    neighbors = (0.0, 0.0)
    """The least and the most bytes of a neighbor."""
    platform: str | None = None

    def __init__(self, folder: Path) -> None:
        self.folder, self.base = folder / self.kind, time.time()
        self.folder.mkdir()
        run_dir = RunDirectory(self.folder / "run")
        super().__init__(SCENARIOS[HEALTHY], 0, DAY, planned_steps=300, use=GpuUse([0, 0]))
        nvml = FakeNvml(lambda: [self.card()], Versions("580", "13", "13.0", None, self.platform))
        self._exporter = Exporter(nvml, run_dir, 120, clock=lambda: self.base + self.now)

    @property
    def uuid(self) -> str:
        """The GPU of this node."""
        return f"GPU-{self.kind}"

    def neighbor(self) -> int:
        """Return what a neighbor holds now: more or less in each hour, as programs are opened."""
        least, most = self.neighbors
        return int(least + (most - least) * (int(self.now / HOUR) * 3 % 5) / 4)

    def processes(self) -> Sequence[ProcessMemory]:
        """Return what NVML lists."""
        own = self.gpu.use.own()
        return [ProcessMemory(os.getpid(), own)] if own else []

    def memory(self) -> MemoryInfo | None:
        """Return what NVML reports of the card."""
        used = self.gpu.use.total()
        return MemoryInfo(self.total + GIB, used, self.total - used, GIB)

    def card(self) -> FakeGpu:
        """Return the GPU as NVML reports it."""
        memory, busy = self.memory(), 0.9 if self.processes() else 0.0
        free: dict[str | None, int] = {None: memory.free} if memory else {}
        listed = None if self.platform else Processes(self.processes(), {}, memory, free)
        unified = UnifiedMemory(memory is None)
        identity = GpuIdentity(0, self.uuid, "GPU")
        return FakeGpu(identity, memory, unified, listed, Utilization(gpu=busy))

    def host(self) -> HostMemory:
        """Return the memory of the host."""
        return HostMemory(4 * GIB, 256 * GIB, 200 * GIB)

    def _live(self, step_ended: bool) -> None:
        self.gpu.use.cells[1] = self.neighbor()
        super()._live(step_ended)

    def look(self, published: Sample, state: State) -> None:
        """Publish as the SDK does, and keep what a scrape of the exporter returns."""
        now = self.base + self.now
        sample = replace(
            published,
            timestamp=now,
            process=own_process(run=HEALTHY, launch=None, start_timestamp=self.base),
            devices=tuple(
                replace(
                    each,
                    stats_timestamp=now,
                    layout=each.layout and replace(each.layout, timestamp=now),
                )
                for each in published.devices
            ),
            steps=replace(published.steps, last_timestamp=now),
            host=self.host(),
            ended=None if state == "running" else "exited",
        )
        publish(self.folder / "run", sample)
        for family in self._exporter.collect():
            for each in (each for each in family.samples if not each.name.endswith("_bucket")):
                value = each.value
                if each.name.endswith("_timestamp_seconds"):
                    value -= self.base
                series = series_name(self.kind, each.name, *each.labels.items())
                self.series[series][self.scraped] = value

    def day(self) -> Series:
        """Return all series of a day."""
        with closing(self._exporter):
            return self.play()


class Spark(Node):
    """A GB10: the host's programs come and go, and a large file fills the page cache each hour."""

    kind = "gb10"
    neighbors = (5.0 * GIB, 25.0 * GIB)

    def open_backend(self) -> SimulatedBackend:
        """Return an allocator whose driver says what CUDA says on such a machine."""
        node = self

        class Shared(SimulatedBackend):
            def devices(self) -> Sequence[Device]:
                return [replace(each, shares_host_memory=True) for each in super().devices()]

            def free_bytes(self, device: int) -> int | None:
                return node.reading.read(device, node.total, is_shared=True)

        cuda = SimpleNamespace(mem_get_info=lambda _: (self.kernel_free(), self.total))
        torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None))
        self.reading = FreeMemory(torch, self.folder)
        return Shared([self.allocator])

    def available(self) -> int:
        """Return MemAvailable, and write it to the fake /proc."""
        available = self.gpu.mem_get_info()[0]
        text = f"MemTotal: {self.total >> 10} kB\nMemAvailable: {available >> 10} kB\n"
        (self.folder / "meminfo").write_text(text)
        return available

    def kernel_free(self) -> int:
        """Return MemFree, which is nearly nothing for the half of each hour after a file."""
        return self.available() if self.now % HOUR < HOUR / 2 else 300 * MIB

    def memory(self) -> None:
        """Return nothing: the call is not supported."""

    def host(self) -> HostMemory:
        """Return the memory that the GPU shares."""
        return HostMemory(4 * GIB, self.total, self.available())


class Windows(Node):
    """A card under WSL, whose Windows desktop holds memory, also when nothing is trained."""

    kind = "wsl"
    neighbors = (1.5 * GIB, 3.0 * GIB)
    platform = "wsl"


class Pod(Node):
    """A pod of HAMi: 80 GiB of a card of 180, on which another pod trains."""

    kind = "hami"

    def other(self) -> int:
        """Return what the other pod holds."""
        return int(40 * GIB + 30 * GIB * (self.now % HOUR > HOUR / 2))

    def memory(self) -> MemoryInfo:
        """Return what NVML reports of the whole card."""
        used = self.gpu.use.total() + self.other()
        return MemoryInfo(181 * GIB, used, 180 * GIB - used, GIB)

    def processes(self) -> Sequence[ProcessMemory]:
        """Return the processes of both pods."""
        return [*super().processes(), ProcessMemory((1 << 22) + 1, self.other())]


NODES = (Spark, Windows, Pod)


@pytest.mark.stack
def test_a_healthy_day_fires_nothing(tmp_path: Path) -> None:
    """Neither while a rank trains nor in the hours after it, on any of these machines."""
    series: Series = defaultdict(dict)
    for kind in NODES:
        series |= kind(tmp_path).day()
        up = f'up{{job="torchmem",instance="{kind.kind}:9847"}}'
        series[up] = dict.fromkeys(range(int(DAY.watched / DAY.scrape)), 1.0)
    assert {node for node in NODES if _trained(series, node) > 290} == set(NODES)
    inputs = ((name, _twice(promtool_values(values))) for name, values in series.items())
    minutes = int(DAY.watched / 60)

    assert fired(inputs, minutes, tmp_path, counted=minutes, step=int(DAY.scrape)) == []


def _trained(series: Series, node: type[Node]) -> float:
    """Return how many steps were scraped from a node."""
    return max(
        max(values.values())
        for name, values in series.items()
        if name.startswith("torchmem_steps_total{") and f'"{node.kind}:9847"' in name
    )


def _twice(values: str) -> str:
    """Return the values of each minute, of which the exporter was scraped in every other one."""
    return " ".join(each for each in values.split() for _ in range(2))
