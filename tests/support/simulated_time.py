"""Scenarios in simulated time: what Prometheus would scrape in an hour, made in a second.

Everything but the clock is real: the simulated allocator under the SDK's own recorder, the sample
that the SDK would write, and the function that turns it into metric families.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from prometheus_client.core import Metric

from torchmem.allocator.settings import DEFAULT_CONFIG, AllocatorConfig
from torchmem.explain.threat_series import judged_families
from torchmem.explain.thresholds import Limits, defaults
from torchmem.explain.verdict import Circumstances
from torchmem.metrics import catalog
from torchmem.metrics.families import ProcessView, families, family
from torchmem.sample.launch import launch_of
from torchmem.sample.sample import DeviceSample, Process, Sample, SelfCost, State, Steps
from torchmem.sdk.draft import Draft
from torchmem.sdk.observation import FailedAllocation
from torchmem.sdk.oom.examination import OomExaminer
from torchmem.sdk.reading.growth import GrowthJudge
from torchmem.sdk.reading.plan import Plan, PlannedPeaks
from torchmem.sdk.reading.recorder import Recorder
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import GpuUse, SimulatedGpu
from torchmem.simulator.scenarios import SCENARIOS, Scenario, SimulatedRank

RANKS = 2
STEPS = 240
"""Of 15 seconds each."""
TRAINED_SECONDS = 3600.0
WATCHED_SECONDS = 4200.0
"""Ten minutes more than the training, to see what dead ranks leave."""
SCRAPE_SECONDS = 15.0
SNAPSHOT_SECONDS = 10.0
WATCHED_SNAPSHOT_SECONDS = 30.0
"""As often as most rules are evaluated."""
EVENTS_PER_STEP = 4
"""As in the demo, where each event of a scenario takes a quarter of a step."""

LIMITS: Limits = defaults().limits("", "")
"""The shipped thresholds, by which the exporter judges."""

Series = dict[str, dict[int, float]]
"""Values by series, as Prometheus writes it, and by the number of the scrape."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a rank trains and is watched, what an event takes, and the pause between scrapes.

    `snapshot` is the usual pause between snapshots, which take much of the CPU time. `after` is how
    long it is watched after its end at least. After `idle` without a step, the statistics are read
    at every event: a step of a scenario stands for many, so this is longer than the SDK's setting
    `idle_after`. All in seconds.
    """

    trained: float = TRAINED_SECONDS
    watched: float = WATCHED_SECONDS
    event: float = TRAINED_SECONDS / STEPS / EVENTS_PER_STEP
    scrape: float = SCRAPE_SECONDS
    snapshot: float = SNAPSHOT_SECONDS
    after: float = 0.0
    idle: float = math.inf


@dataclass
class Rank:
    """One rank on a GPU of its own, and the series that are scraped from both.

    The scenario unfolds over `planned_steps`. `capacity` is what CUDA can allocate of the GPU, and
    `use` counts what is; by default all of it, and a count of its own.
    """

    scenario: Scenario
    rank: int
    pace: Pace = Pace()
    config: AllocatorConfig = DEFAULT_CONFIG
    planned_steps: int = STEPS
    capacity: int | None = None
    use: GpuUse | None = None
    series: Series = field(default_factory=lambda: defaultdict(dict))
    before_read: Callable[[Plan], None] = lambda _: None
    """What the script does at the end of a step."""

    def __post_init__(self) -> None:
        self.name, self.total = self.scenario.name, self.scenario.gpu_bytes
        use = self.use or GpuUse([0] * (1 + self.scenario.neighbors))
        capacity = self.capacity or self.total
        self.gpu = SimulatedGpu(capacity, use=use, uuid=self.uuid, name="Simulated")
        self.allocator = DeviceCachingAllocator(self.gpu, config=self.config)
        self.backend = self.open_backend()
        self.recorder, self.plan = Recorder(self.backend), Plan()
        self._ooms, self._growth = OomExaminer(self.recorder), GrowthJudge(self.recorder)
        self._peaks = PlannedPeaks(self.plan, self.recorder)
        self.backend.on_oom(self._on_oom)
        self.chance = Random(self.rank)
        self.now, self.scraped, self.steps = 0.0, 0, 0
        self.snapshot_at = 0.0
        self.last_step_at, self.last_read_at, self.last_snapshot_at = 0.0, 0.0, 0.0
        self.last_progress_at: float | None = None
        self.oom_at: float | None = None
        self.last_oom_at = 0.0

    def open_backend(self) -> SimulatedBackend:
        """Return the allocator as the SDK sees it."""
        return SimulatedBackend([self.allocator])

    def play(self) -> Series:
        """Train until the time is over or memory runs out, and scrape until the end."""
        self.recorder.read_settings()
        self.recorder.read_stats()
        capacity = self.gpu.mem_get_info()[0]
        self.simulated = SimulatedRank(
            self.allocator, self.rank, RANKS, self.planned_steps, 0, capacity
        )
        state: State = "exited"
        try:
            for event in self.scenario.train(self.simulated):
                self._live(event == "step")
                if self.now >= self.pace.trained:
                    break
        except OutOfMemoryError:
            state, self.oom_at = "oom", self.now
        self.gpu.use.cells[0] = 0
        until = max(self.pace.watched, self.now + self.pace.after)
        while self.now < until:
            self.now += self.pace.scrape
            self._scrape(state)
        return self.series

    def _on_oom(self, device: int, requested: int, limit: int, driver_free: int) -> None:
        self.last_oom_at = self.now
        failed = FailedAllocation(device, requested, limit, driver_free)
        self._ooms.examine(failed, Circumstances(self.steps))

    def _live(self, step_ended: bool) -> None:
        self.now += self.pace.event
        if self.now - self.last_step_at > self.pace.idle:
            self._read_between_steps()
        if self.now >= self.snapshot_at:
            self.recorder.take_snapshot()
            self.last_snapshot_at = self.now
            self.snapshot_at = self.now + self.pace.snapshot * self.chance.uniform(0.75, 1.25)
        if step_ended:
            self.steps += 1
            self.end_step()
        self._scrape("running")

    def _read_between_steps(self) -> None:
        before = self.recorder.allocations
        self.recorder.read_stats()
        self.last_read_at = self.now
        if self.recorder.allocations > before:
            self.last_progress_at = self.now

    def end_step(self) -> None:
        """Read the statistics, as the SDK does at the end of a step."""
        self.before_read(self.plan)
        self.recorder.read_stats("step")
        self.last_step_at = self.last_read_at = self.now
        self.recorder.add_points(self.steps)
        self._peaks.after_read(self.steps)

    def _scrape(self, state: State) -> None:
        if self.now < self.scraped * self.pace.scrape:
            return
        self.recorder.measure_snapshot()
        self._growth.judge()
        self.look(self._sample(), state)
        self.scraped += 1

    def look(self, published: Sample, state: State) -> None:
        """Keep what a scrape returns."""
        view = ProcessView(published, self.pid, state, {self.uuid: str(self.rank)})
        own = [*families([view]), *judged_families([view], lambda _: LIMITS)]
        for metric in [*own, *self._nvml(state)]:
            for sample in metric.samples:
                series = series_name(self.name, sample.name, *sample.labels.items())
                self.series[series][self.scraped] = sample.value

    @property
    def uuid(self) -> str:
        """The GPU of this rank and scenario."""
        return f"GPU-{self.name}-{self.rank}"

    @property
    def pid(self) -> int:
        """The process id."""
        return 1000 + self.rank

    @property
    def _launch(self) -> str:
        return launch_of(0, [self.name])

    def _sample(self) -> Sample:
        durations = (*Steps().duration_counts[:-1], self.steps)
        sample = Sample(
            timestamp=self.now,
            process=Process(self.pid, None, None, "n", self.name, self.rank, launch=self._launch),
            devices=self.recorder.samples(),
            steps=Steps(self.steps, durations, self.now),
            cost=SelfCost(2e-5, 2e-3, self.now * 1e-4),
            allocator_settings=self.recorder.settings,
        )
        draft = Draft(sample.devices)
        for part in (self._ooms, self._growth, self._peaks):
            part.complete(draft)
        sample = replace(sample, **draft.finished())
        return replace(sample, devices=tuple(map(self._dated, sample.devices)))

    def _dated(self, device: DeviceSample) -> DeviceSample:
        """Replace the recorder's timestamps by simulated ones."""
        layout = device.layout and replace(device.layout, timestamp=self.now)
        oom = device.last_oom and replace(device.last_oom, timestamp=self.last_oom_at)
        return replace(device, layout=layout, last_oom=oom)

    def _nvml(self, state: State) -> Iterator[Metric]:
        gpu = (str(self.rank), self.uuid)
        used, own = self.gpu.use.total(), self.gpu.use.own()
        reserved = self.allocator.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"]
        yield family(catalog.NVML_GPU_UP, [(gpu, 1)])
        yield family(catalog.NVML_MEMORY_TOTAL, [(gpu, self.total)])
        yield family(catalog.NVML_MEMORY_USED, [(gpu, used)])
        yield family(catalog.NVML_MEMORY_FREE, [(gpu, self.total - used)])
        yield family(
            catalog.NVML_UTILIZATION, [((*gpu, "gpu"), 0.9 if state == "running" else 0.0)]
        )
        if state == "running":
            outside = (*gpu, str(self.rank), str(self.pid), self.name, self._launch)
            yield family(catalog.OUTSIDE_ALLOCATOR, [(outside, own - reserved)])


@cache
def series_name(scenario: str, name: str, *labels: tuple[str, str]) -> str:
    """Return a series as Prometheus writes it, without labels that have no value."""
    target = {"job": "torchmem", "instance": instance(scenario)}
    known = {label: value for label, value in labels if value}
    written = ",".join(f'{label}="{value}"' for label, value in {**target, **known}.items())
    return f"{name}{{{written}}}"


def scrapes(name: str) -> Series:
    """Return every series of a scenario's ranks, GPUs, and exporter.

    Buckets are left out because no rule reads them.
    """
    series: Series = {}
    pace = Pace(snapshot=WATCHED_SNAPSHOT_SECONDS)
    for rank in (0, RANKS - 1):
        series |= {
            name: values
            for name, values in Rank(SCENARIOS[name], rank, pace).play().items()
            if "_bucket{" not in name
        }
    up = f'up{{job="torchmem",instance="{instance(name)}"}}'
    return series | {
        up: dict.fromkeys(range(max(max(values) for values in series.values()) + 1), 1.0)
    }


def instance(name: str) -> str:
    """Return the instance label of a scenario's node."""
    return f"{name}:9847"


def promtool_values(values: dict[int, float]) -> str:
    """Return one value per scrape until the last, in promtool's notation.

    As in Prometheus, a series that a scrape lacks ends there.
    """
    return " ".join(
        f"{values[number]:.17g}" if number in values else "stale" if number - 1 in values else "_"
        for number in range(max(values) + 2)
    )
