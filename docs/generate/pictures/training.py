"""Training processes in virtual time: hours of training, played in seconds.

Everything but the clock is real: the simulated allocator under the SDK's own recorder, and the
sample that the SDK would write.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

from torchmem.allocator.settings import ADVICE_LABEL
from torchmem.explain.call_stack import CallStack, Frame, Origin
from torchmem.explain.oom_report import OomTrend
from torchmem.explain.remedies import remedies
from torchmem.explain.verdict import Circumstances
from torchmem.host.procfs import pid_namespace
from torchmem.node.published import Published
from torchmem.sample.launch import launch_of
from torchmem.sample.run_directory import DEFAULT_TTL_SECONDS
from torchmem.sample.sample import (
    LIVE_STATES,
    STEP_DURATION_BOUNDS,
    DeviceSample,
    HostMemory,
    PinnedMemory,
    Process,
    Sample,
    SelfCost,
    State,
    Steps,
)
from torchmem.sdk.draft import Draft
from torchmem.sdk.observation import FailedAllocation
from torchmem.sdk.oom.examination import OomExaminer
from torchmem.sdk.oom.report_writer import compose
from torchmem.sdk.reading.growth import GrowthJudge
from torchmem.sdk.reading.recorder import Recorder
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu
from torchmem.simulator.scenarios import SCENARIOS, ScenarioEvent, SimulatedRank

STATS_SECONDS = 2e-5
SNAPSHOT_COST_SECONDS = 2e-3
CPU_SHARE = 2e-4
SAMPLES_PER_STEP = 64
GIB = 1 << 30
HOST_BYTES = 512 * GIB
EVENTS_PER_STEP = 4
ORIGIN = Origin(CallStack((Frame("/home/ann/llm/feed_forward.py", 1188, "MLP.forward"),)))


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a rank: from `start` until it runs out of memory, or until `end`.

    `ending` is its state after `end`, `advice` what `torchmem run --apply-advice` did. The scenario
    unfolds over `steps` steps of `step_seconds` each. Times are Unix seconds.
    """

    scenario: str
    run: str
    rank: int
    world_size: int
    pid: int
    start: float
    end: float
    ending: State = "running"
    steps: int = 600
    step_seconds: float = 5.0
    snapshot_seconds: float = 20.0
    advice: str = ""
    user: str = ""
    team: str = ""


class Trainer:
    """Plays one life on a GPU. `played` is how far; the state is that of the process then.

    `used_bytes` is what the driver had given it when the SDK last read the allocator, because the
    exporter compares values of the same moment.
    """

    def __init__(self, life: Life, gpu: SimulatedGpu, local_rank: int) -> None:
        self.life, self.gpu = life, gpu
        self.allocator = DeviceCachingAllocator(gpu)
        self._backend = SimulatedBackend([self.allocator])
        self._recorder = Recorder(self._backend)
        self._ooms, self._growth = OomExaminer(self._recorder), GrowthJudge(self._recorder)
        self._backend.on_oom(self._on_oom)
        self._chance = Random(f"{life.run}:{life.rank}:{life.pid}")
        self.local_rank = local_rank
        self._durations = [0] * (len(STEP_DURATION_BOUNDS) + 1)
        self._steps, self._last_step = 0, life.start
        self._snapshot_taken = self._snapshot_at = self.played = life.start
        self.state: State = "running"
        self.ended: float | None = None
        self._oom_at = life.start
        self._first = 0
        self._events = self._train()
        self._recorder.read_settings()
        self._read_stats()

    @property
    def is_live(self) -> bool:
        """Whether the process still exists."""
        return self.state in LIVE_STATES

    def play(self, now: float) -> None:
        """Train until `now`."""
        while self.is_live and self.played < min(now, self.life.end):
            self._next_event()
        if self.is_live and now >= self.life.end:
            self.end(self.life.ending, self.life.end)
        self._recorder.measure_snapshot()
        self._growth.judge()

    def published(self, now: float) -> Published | None:
        """Return what an exporter knows of the process at `now`; None once it has forgotten it."""
        if now < self.life.start:
            return None
        if self.ended is not None and now - self.ended > DEFAULT_TTL_SECONDS:
            return None
        return Published(self._sample(now), self.life.pid, self.state, attributed=self.is_live)

    def own_page(self) -> Mapping[str, float]:
        """Return the metrics that the program itself serves, by name: those of an engine."""
        return {}

    def _train(self) -> Iterator[ScenarioEvent]:
        life = self.life
        capacity = self.gpu.mem_get_info()[0]
        worker = SimulatedRank(self.allocator, life.rank, life.world_size, life.steps, 0, capacity)
        return SCENARIOS[life.scenario].train(worker)

    def _next_event(self) -> None:
        life = self.life
        self.played += life.step_seconds / EVENTS_PER_STEP * self._chance.uniform(0.9, 1.1)
        try:
            event = next(self._events)
        except OutOfMemoryError:
            self.end("oom", self.played)
            return
        if self.played >= self._snapshot_at:
            self._recorder.take_snapshot()
            self._snapshot_taken = self.played
            self._snapshot_at = (
                self.played + self._chance.uniform(0.75, 1.25) * life.snapshot_seconds
            )
        if event == "step":
            self._step()

    def _step(self) -> None:
        self._durations[bisect_left(STEP_DURATION_BOUNDS, self.played - self._last_step)] += 1
        self._steps, self._last_step = self._steps + 1, self.played
        self._read_stats()
        self._recorder.add_points(self._steps)

    def _read_stats(self) -> None:
        self._recorder.read_stats()
        self.used_bytes = self.gpu.use.own()

    def end(self, state: State, when: float) -> None:
        """End the process at a time; the driver frees its memory."""
        self.state, self.ended = state, when
        if not self.is_live:
            self.gpu.use.cells[self.gpu.use.slot] = self.used_bytes = 0

    def _on_oom(self, device: int, requested: int, limit: int, driver_free: int) -> None:
        self._oom_at = self.played
        failed = FailedAllocation(device, requested, limit, driver_free, ORIGIN)
        observation = self._ooms.examine(failed, Circumstances(self._steps))
        report = compose(observation, self._sample(self.played), OomTrend())
        first = next(iter(remedies(report)), None)
        if first and first.kind:
            self._ooms.advise(report, first.kind)
        self.used_bytes = self.gpu.use.own()

    def _sample(self, now: float) -> Sample:
        life = self.life
        process = Process(
            life.pid,
            pid_namespace(),
            None,
            "node1",
            life.run,
            life.rank,
            self.local_rank,
            life.world_size,
            "train.py",
            {"slurm_job_id": "4711"}
            | ({ADVICE_LABEL: life.advice} if life.advice else {})
            | ({"slurm_job_user": life.user, "slurm_job_account": life.team} if life.user else {}),
            {"torch": "2.13.0", "cuda": "13.0", "python": "3.12.9", "backend": "native"},
            life.start,
            launch_of(1000, [life.run]),
        )
        seconds = self._last_step - life.start
        sample = Sample(
            timestamp=min(self.played, now),
            process=process,
            devices=self._recorder.samples(),
            steps=self._steps_so_far(seconds),
            cost=SelfCost(STATS_SECONDS, SNAPSHOT_COST_SECONDS, seconds * CPU_SHARE),
            allocator_settings=self._recorder.settings,
            pinned=PinnedMemory(2 * GIB, GIB),
            host=HostMemory(self._host_bytes(), HOST_BYTES, HOST_BYTES - 8 * self._host_bytes()),
        )
        draft = Draft(sample.devices)
        self._complete(draft)
        sample = replace(sample, **draft.finished())
        return replace(sample, devices=tuple(self._dated(each, now) for each in sample.devices))

    def _complete(self, draft: Draft) -> None:
        self._ooms.complete(draft)
        self._growth.complete(draft)

    def _steps_so_far(self, seconds: float) -> Steps:
        durations, samples = tuple(self._durations), self._steps * SAMPLES_PER_STEP
        return Steps(self._steps, durations, seconds, samples, self._last_step)

    def _host_bytes(self) -> int:
        """Return a resident set that grows slowly, as that of a leaking data loader."""
        return int((12 + 2 * (self.played - self.life.start) / 3600) * GIB)

    def _dated(self, device: DeviceSample, now: float) -> DeviceSample:
        """Replace the recorder's timestamps, which are of the real clock.

        The newest event may have ended a moment after `now`.
        """
        taken, moment = (min(time, now) for time in (self._snapshot_taken, self.played))
        layout = device.layout and replace(device.layout, timestamp=taken)
        oom = device.last_oom and replace(device.last_oom, timestamp=min(self._oom_at, now))
        dated = replace(device, layout=layout, last_oom=oom, stats_timestamp=moment)
        peak = (device.allocator and device.allocator.allocated_peak_bytes) or 0
        phases = self._phase_peaks(peak)
        return replace(dated, components=self._components(device), phase_peaks=phases)

    def _phase_peaks(self, peak: int) -> dict[str, int]:
        return {"forward": peak * 15 // 16, "backward": peak}

    def _components(self, device: DeviceSample) -> dict[str, int]:
        """Split the allocated bytes: of those of the first step, a quarter is parameters."""
        if device.allocator is None:
            return {}
        allocated = device.allocator.allocated_bytes.total
        self._first = self._first or allocated
        parameters = min(allocated, self._first // 4)
        state = min(allocated - parameters, self._first // 2)
        held = allocated - parameters - state
        return {"parameters": parameters, "optimizer_state": state, "held": held}
