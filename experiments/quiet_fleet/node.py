"""A node with one GPU in virtual time: the real exporter over a fake NVML and a real process.

What a scrape returns is kept by series. Times are in seconds of virtual time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from experiments.prediction.jobs import EVENTS_PER_STEP, Job
from support.publishing import own_process, publish
from support.simulated_time import Pace, Rank, Series, series_name

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import GIB, MIB
from torchmem.demo.simulated_nvml import FakeGpu, FakeNvml
from torchmem.exporter.collect import Exporter
from torchmem.exporter.gpus import GpuEvent, GpuIdentity, Versions
from torchmem.exporter.nvml import NvmlDownError
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.clocks import Clocks
from torchmem.exporter.subjects.dead_processes import DeadProcesses
from torchmem.exporter.subjects.ecc import Ecc, Repairs
from torchmem.exporter.subjects.memory import MemoryInfo, UnifiedMemory
from torchmem.exporter.subjects.processes import Processes, ProcessMemory
from torchmem.exporter.subjects.utilization import Utilization
from torchmem.exporter.subjects.xid_events import XID
from torchmem.host.procfs import start_ticks
from torchmem.node.host_processes import HostProcesses
from torchmem.node.published import Published
from torchmem.sample.sample import Ending, HostMemory, Sample, State, Steps
from torchmem.simulator.gpu import GpuUse

SCRAPE_SECONDS = 60.0
DEADLINE_SECONDS = 120.0
"""Of the exporter: a busy machine is no slow driver."""
KEPT_SECONDS = 1200.0
"""How long a node is watched after a process: longer than the exporter shows it (15 minutes)."""
STALL_SECONDS = 300.0
DRIVER_BYTES = 600 * MIB
NAME, UUID, RUN = "node", "GPU-node", "some-run"
"""What a recording calls the node, its GPU and the run; `fleet` gives them other names."""
_HOLDER = "import sys; open('/proc/self/comm', 'w').write(sys.argv[1]); sys.stdin.read()"

HowItEnds = Literal["exited", "failed", "killed"]


class Process:
    """A real process that does nothing, with the name that the kernel shows."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-S", "-E", "-c", _HOLDER, name]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE)
        comm = Path(f"/proc/{self._popen.pid}/comm")
        while comm.read_text().strip() != name[:15]:
            time.sleep(0.005)
        self.pid = self._popen.pid
        self.start_ticks = start_ticks(self.pid)

    def kill(self) -> None:
        """End it, as SIGKILL does."""
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdin:
            self._popen.stdin.close()


@dataclass
class Card:
    """What NVML says of the GPU; a fault changes it."""

    total: int = 80 * GIB
    held: Sequence[ProcessMemory] = ()
    hidden: int = 0
    """Bytes that belong to no listed process."""
    busy: float = 0.0
    throttled: bool = False
    uncorrected: int = 0
    repairs: Repairs = field(
        default_factory=lambda: Repairs(remap_pending=False, remap_failed=False)
    )
    error_code: int | None = None
    down: str | None = None
    broken: type | None = None
    """The kind of value that the driver fails to read."""

    def gpus(self) -> list[FakeGpu]:
        """Return the GPU as NVML lists it."""
        if self.down:
            raise NvmlDownError(self.down)
        used = sum(each.used_bytes or 0 for each in self.held) + self.hidden
        memory = MemoryInfo(self.total + DRIVER_BYTES, used, self.total - used, DRIVER_BYTES)
        listed = Processes(self.held, {}, memory, {None: memory.free})
        reasons = {"sw_thermal_slowdown": self.throttled, "hw_thermal_slowdown": False}
        values = (
            memory,
            UnifiedMemory(False),
            listed,
            Utilization(gpu=self.busy),
            Clocks(throttle=reasons),
            Ecc(True, {("uncorrected", "volatile"): self.uncorrected}),
            self.repairs,
        )
        identity = GpuIdentity(0, UUID, "NVIDIA H100 80GB HBM3")
        return [FakeGpu(identity, *values, event_kinds={XID}, error_code=self.error_code)]


class Hosts(HostProcesses):
    """The host memory of a node's ranks, which is not that of this machine."""

    memory = HostMemory(20 * GIB, 2000 * GIB, 1500 * GIB)

    def update(self, published: Iterable[Published]) -> list[Published]:
        """Return the processes with the node's memory."""
        return [
            replace(each, sample=replace(each.sample, host=self.memory))
            for each in super().update(published)
        ]


class Node:
    """The exporter of a node, and what its scrapes returned."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        card: Card | None = None,
        directory: RunDirectory | None = None,
    ) -> None:
        self.base, self.now, self.scrapes = time.time(), 0.0, 0
        self.card = card or Card()
        self.series: Series = defaultdict(dict)
        self.run_dir = folder / "run"
        self.fault: Callable[[Node], None] = lambda _: None
        """Changes the node before a scrape."""
        self.nvml = FakeNvml(self.card.gpus, Versions("580.65", "13", "13.0"), on_call=self._called)
        self.directory, self._stack = directory or RunDirectory(self.run_dir), stack
        self.hosts = Hosts()

        def clock() -> float:
            return self.base + self.now

        self.exporter = Exporter(
            self.nvml,
            self.directory,
            DEADLINE_SECONDS,
            clock,
            dead=DeadProcesses(clock=clock),
            hosts=self.hosts,
        )
        stack.callback(self.exporter.close)

    def process(self, name: str) -> Process:
        """Start a process, which ends with the recording."""
        started = Process(name)
        self._stack.callback(started.kill)
        return started

    def report(self, xid: int) -> None:
        """Let the driver report an XID error."""
        self.nvml.subscriptions[-1].coming.put(GpuEvent(UUID, XID, xid))
        time.sleep(0.05)

    def scrape(self) -> None:
        """Keep what the exporter returns now."""
        self.fault(self)
        for family in self.exporter.collect():
            for each in family.samples:
                if each.name.endswith("_bucket"):
                    continue
                dated = each.name.endswith("_timestamp_seconds")
                name = series_name(NAME, each.name, *each.labels.items())
                self.series[name][self.scrapes] = each.value - self.base * dated
        self.scrapes += 1

    def watch(self, seconds: float) -> None:
        """Scrape for some time."""
        until = self.now + seconds
        while self.now < until:
            self.now += SCRAPE_SECONDS
            self.scrape()

    def _called(self, call: object, _: object) -> None:
        if call is self.card.broken and call is not None:
            raise RuntimeError("the driver fails")


class Trainer(Rank):
    """A rank that trains on the node's GPU: the simulated allocator under the SDK's recorder.

    `ends` is how the process ends if memory lasts, and `trained` when, in seconds.
    """

    def __init__(
        self, node: Node, made: Job, ends: HowItEnds, trained: float, name: str = "python"
    ) -> None:
        self.node, self.ends, self.is_silent = node, ends, False
        self.process: Process | None = node.process(name)
        pace = Pace(
            trained,
            0.0,
            made.step_seconds / EVENTS_PER_STEP,
            SCRAPE_SECONDS,
            SCRAPE_SECONDS,
            KEPT_SECONDS,
            2 * made.step_seconds,
        )
        config = AllocatorConfig(expandable_segments=made.expandable_segments)
        super().__init__(made.scenario, 0, pace, config, before_read=made.script.tell)
        node.card.total = self.total
        self.plan.set(made.script.largest)
        assert self.process
        self._identity = own_process(
            pid=self.process.pid,
            start_ticks=self.process.start_ticks,
            run=RUN,
            launch=self._launch,
            rank=0,
            start_timestamp=node.base + node.now,
        )

    @property
    def uuid(self) -> str:
        """The node's GPU."""
        return UUID

    def look(self, published: Sample, state: State) -> None:
        """Publish as the SDK does, and scrape the node."""
        node, started = self.node, self._started
        node.now = started + self.now
        if state == "running":
            if not self.is_silent:
                publish(node.run_dir, self._dated_sample(published))
            node.card.busy = 0.9
        elif self.process:
            self._end(published, state)
        use: GpuUse = self.gpu.use
        node.card.held = (
            [ProcessMemory(self.process.pid, use.own())] if self.process and use.own() else []
        )
        if use.total() > use.own():
            node.card.held = [
                *node.card.held,
                ProcessMemory((1 << 22) + 1, use.total() - use.own()),
            ]
        node.scrape()

    def _end(self, published: Sample, state: State) -> None:
        ended: Ending | None = "oom" if state == "oom" else None
        if state == "exited" and self.ends != "killed":
            ended = self.ends
        last = replace(self._dated_sample(published), ended=ended)
        if ended:
            publish(self.node.run_dir, last)
        self.node.card.busy = 0.0
        if self.process:
            self.process.kill()
        self.process = None

    @property
    def _started(self) -> float:
        return self._identity.start_timestamp - self.node.base  # type: ignore[operator]

    def _dated_sample(self, published: Sample) -> Sample:
        """Return the sample with the process, and with times as the exporter's clock has them."""
        shift, now = self.node.base + self._started, self.node.base + self.node.now
        return replace(
            published,
            timestamp=now,
            process=self._identity,
            devices=tuple(
                replace(
                    each,
                    stats_timestamp=shift + self.last_read_at,
                    layout=each.layout
                    and replace(each.layout, timestamp=shift + self.last_snapshot_at),
                    last_oom=each.last_oom
                    and replace(each.last_oom, timestamp=shift + self.last_oom_at),
                )
                for each in published.devices
            ),
            steps=self._dated_steps(published.steps, shift) if self.steps else published.steps,
            stall_after_seconds=STALL_SECONDS,
            host=None,
        )

    def _dated_steps(self, steps: Steps, shift: float) -> Steps:
        progress = self.last_progress_at
        return replace(
            steps,
            last_timestamp=shift + self.last_step_at,
            progress_timestamp=None if progress is None else shift + progress,
        )
