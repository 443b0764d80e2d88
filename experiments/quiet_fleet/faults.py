"""Forty faults, each on a node that was healthy before, and the alerts that must tell them.

A fault comes at a time drawn by its seed. Its documented time is what the alert's rule waits for
(`for`), after what must have been there before (`reads`). Scrape and evaluation take a minute each
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
from experiments.prediction.jobs import HOUR, Job, job
from experiments.quiet_fleet.composition import notation, renamed
from experiments.quiet_fleet.evaluation import Fired, fired, for_minutes, metrics_read
from experiments.quiet_fleet.fleet import Placed
from experiments.quiet_fleet.node import HowItEnds, Node, Process, Trainer
from experiments.quiet_fleet.recordings import Values, Workload, arrays
from support.publishing import publish

from torchmem.allocator.sizes import GIB
from torchmem.exporter.sample_files import RunDirectory
from torchmem.exporter.subjects.clocks import Clocks
from torchmem.exporter.subjects.ecc import Repairs
from torchmem.exporter.subjects.processes import ProcessMemory
from torchmem.node.published import Published
from torchmem.sample.sample import HostMemory
from torchmem.simulator.scenario import Scenario, ScenarioEvent, SimulatedRank

Act = Callable[[Node, Trainer | None], None]
"""What a fault does to a node, in each minute from its time on."""
SCRAPES = 2
"""Minutes until a fault is scraped and evaluated."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault: the alerts of which one must tell it, and how many are seeded.

    `reads`: minutes for which a fault must have been there until the alert's condition is true;
    None: it must be told before the rank dies of an OOM. `job`: the kind of job that has the fault
    itself; None: no rank is there.
    """

    name: str
    alerts: tuple[str, ...]
    number: int = 1
    act: Act = lambda _node, _trainer: None
    reads: float | None = 0
    job: str | None = "stable"
    ends: HowItEnds = "exited"
    is_down: bool = False
    severity: str | None = None

    @property
    def within(self) -> float | None:
        """The documented time in minutes."""
        if self.reads is None:
            return None
        return self.reads + for_minutes(self.alerts[0], self.severity)


@dataclass(frozen=True, slots=True)
class Told:
    """How a fault was told: minutes after it, below zero before an OOM; None if it was not.

    `others` fired as well, and `before` fired before the fault.
    """

    fault: str
    seed: int
    within: float | None
    alert: str | None
    minutes: float | None
    others: tuple[str, ...]
    before: tuple[str, ...]

    @property
    def in_time(self) -> bool:
        """Whether it was told within the documented time."""
        limit = 0.0 if self.within is None else self.within + SCRAPES
        return self.minutes is not None and self.minutes <= limit


class FullDirectory(RunDirectory):
    """A run directory on a file system that fills at a time."""

    is_full = False

    def read(self, now: float) -> list[Published]:
        """Return the processes, and note the room."""
        found = super().read(now)
        if self.is_full:
            self.status = replace(self.status, free_bytes=1 << 20)
        return found


def _card(**changes: object) -> Act:
    def act(node: Node, _: Trainer | None) -> None:
        for name, value in changes.items():
            setattr(node.card, name, value)

    return act


def _once(act: Act) -> Act:
    done: set[int] = set()

    def at_first(node: Node, trainer: Trainer | None) -> None:
        if id(node) not in done:
            done.add(id(node))
            act(node, trainer)

    return at_first


def _xid(node: Node, _: Trainer | None) -> None:
    node.report(79 if node.scrapes % 2 else 94)


def _silent(_: Node, trainer: Trainer | None) -> None:
    if trainer:
        trainer.is_silent = True


def _host_memory(node: Node, _: Trainer | None) -> None:
    node.hosts.memory = HostMemory(1500 * GIB, 2000 * GIB, 60 * GIB)


def _dead(node: Node, trainer: Trainer | None) -> None:
    """Let the driver go on to list a process that has ended."""
    if trainer is None and not node.card.held:
        gone = Process("python")
        gone.kill()
        node.card.held = [ProcessMemory(gone.pid, 30 * GIB)]


def _full(node: Node, _: Trainer | None) -> None:
    if isinstance(node.directory, FullDirectory):
        node.directory.is_full = True


def _rejected(node: Node, _: Trainer | None) -> None:
    publish(node.run_dir, b"{")


def _unusable(node: Node, _: Trainer | None) -> None:
    node.run_dir.chmod(0o777)


def _left_open(node: Node, _: Trainer | None) -> None:
    if not node.card.held:
        node.card.held = [ProcessMemory(node.process("python").pid, 12 * GIB)]


WARNED = ("TorchmemOutOfMemoryPredicted", "TorchmemNearCapacity")
PENDING, FAILED = Repairs(remap_pending=True, remap_failed=False), Repairs(remap_failed=True)
FAULTS = (
    Fault("a leak", ("TorchmemMemoryLeak", *WARNED), 3, reads=None, job="leak grows"),
    Fault(
        "fragmentation",
        ("TorchmemFragmentationHigh", *WARNED),
        2,
        reads=None,
        job="fragmentation grows",
    ),
    Fault(
        "a neighbor that grows",
        ("TorchmemOutsideAllocatorGrowth", *WARNED),
        2,
        reads=None,
        job="neighbor grows",
    ),
    Fault("one batch that does not fit", ("TorchmemOutOfMemory",), 2, job="spike"),
    Fault("an evaluation that does not fit", ("TorchmemOutOfMemory",), job="first evaluation"),
    Fault("a killed rank", ("TorchmemRankKilled",), 3, ends="killed"),
    Fault("a failed rank", ("TorchmemRankFailed",), ends="failed"),
    Fault("a rank that hangs", ("TorchmemRankStalled",), 2, reads=5),
    Fault("a rank that no longer publishes", ("TorchmemSamplerStalled",), 1, _silent, 5),
    Fault("host memory almost full", ("TorchmemHostMemoryLow",), 2, _host_memory),
    Fault("an XID error", ("TorchmemGpuXid",), 3, _once(_xid)),
    Fault("a lost GPU", ("TorchmemGpuLost",), 2, _card(error_code=15)),
    Fault("uncorrected memory errors", ("TorchmemGpuMemoryFaulty",), 2, _card(uncorrected=2)),
    Fault("a row that waits for a reset", ("TorchmemGpuResetNeeded",), 1, _card(repairs=PENDING)),
    Fault("no spare row left", ("TorchmemGpuMemoryFaulty",), 1, _card(repairs=FAILED)),
    Fault("a hot GPU", ("TorchmemGpuThrottled",), 2, _card(throttled=True), 2.5),
    Fault("memory of a dead process", ("TorchmemGpuDeadProcess",), 1, _dead, job=None),
    Fault("memory of no process", ("TorchmemMemoryUnaccounted",), 1, _card(hidden=6 * GIB)),
    Fault("a forgotten notebook", ("TorchmemGpuIdle",), 1, _left_open, 10, None),
    Fault("a node with ranks that is down", ("TorchmemExporterDown",), 2, is_down=True),
    Fault(
        "another node that is down",
        ("TorchmemExporterDown",),
        job=None,
        is_down=True,
        severity="warning",
    ),
    Fault("a driver call that fails", ("TorchmemCollectorFailing",), 1, _card(broken=Clocks)),
    Fault("a full run directory", ("TorchmemRunDirectoryFull",), 1, _full),
    Fault("a damaged sample file", ("TorchmemSamplesRejected",), 1, _once(_rejected)),
    Fault("a run directory open to all", ("TorchmemRunDirectoryUnusable",), 1, _unusable),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """The series of a faulty node, in which minute its fault came, and when its rank died."""

    place: int
    seed: int
    at: int
    died: int | None
    series: dict[str, Values]

    @property
    def fault(self) -> Fault:
        """Its kind, at its place in FAULTS."""
        return FAULTS[self.place]


def seeded(seed: int) -> list[tuple[int, int]]:
    """Return the places of the faults in FAULTS, and a seed for each."""
    return [
        (place, seed * 100 + number)
        for place, fault in enumerate(FAULTS)
        for number in range(fault.number)
    ]


def play(place: int, seed: int) -> Scene:
    """Record a node until its fault has been there for longer than it may take to tell it.

    A job that must run out of memory and does not in 6 hours is drawn again.
    """
    scene = _play(place, seed)
    survived = scene.fault.within is None and scene.died is None
    return play(place, seed + 50) if survived else scene


def _play(place: int, seed: int) -> Scene:
    fault = FAULTS[place]
    rng = Random(f"{fault.name} {seed}")  # noqa: S311 -- a workload, not a secret
    at = rng.randint(40, 70)
    until = 60.0 * (at + (fault.within or 0) + 25)
    died, trainer = None, None
    with TemporaryDirectory() as folder, ExitStack() as stack:
        node = Node(Path(folder), stack, directory=FullDirectory(Path(folder) / "run"))
        if fault.job:
            made, trained = _job(fault, seed, at, until)
            trainer = Trainer(node, made, fault.ends, trained)
        node.fault = lambda node: fault.act(node, trainer) if node.now > 60 * at else None
        if trainer is None:
            node.watch(until)
        else:
            trainer.play()
            if trainer.oom_at is not None:
                died = at = int(trainer.oom_at // 60) + 1
        found = arrays(node)
    if fault.is_down:
        for values in found.values():
            values[at:] = np.nan
    return Scene(place, seed, at, died, found)


def _job(fault: Fault, seed: int, at: int, until: float) -> tuple[Job, float]:
    """Return the job of a fault and how long it trains."""
    assert fault.job
    if fault.job != "stable":
        return job(fault.job, seed), 6 * HOUR
    made = Workload("stable", seed).made
    if fault.ends != "exited":
        return made, 60.0 * at
    if fault.name == "a rank that hangs":
        made = replace(made, scenario=hanging(made.scenario, 60.0 * at, made.step_seconds / 5))
    return made, until


def hanging(scenario: Scenario, at: float, event_seconds: float) -> Scenario:
    """Return a scenario whose steps end at a time, as in a collective that never returns."""

    def train(worker: SimulatedRank) -> Iterator[ScenarioEvent]:
        yield from islice(scenario.train(worker), round(at / event_seconds))
        while True:
            yield "compute"

    return replace(scenario, train=train)


def told_faults(seed: int, folder: Path) -> list[Told]:
    """Play all faults on all cores, and return how they were told."""
    with ProcessPoolExecutor() as pool:
        played = list(pool.map(play, *zip(*seeded(seed), strict=True)))
    return told(played, folder)


def told(played: list[Scene], folder: Path) -> list[Told]:
    """Return how the faults were told."""
    series: dict[str, Values] = {}
    read = metrics_read()
    minutes = max(len(v) for scene in played for v in scene.series.values())
    for number, scene in enumerate(played):
        series |= _named(scene, number, minutes, read)
    inputs = [(name, notation(values)) for name, values in series.items()]
    found = fired(inputs, minutes, folder, counted=minutes)
    return [_told(scene, number, found) for number, scene in enumerate(played)]


def _named(scene: Scene, number: int, minutes: int, read: frozenset[str]) -> dict[str, Values]:
    """Return the series of a node, and of a healthy rank of the same run on another node."""
    workload = Workload("stable")
    node = f"fault{number:02}"
    found: dict[str, Values] = {}
    placed = Placed(workload, node, 0, 0, 0, f"run-{number}", f"1-{number}", 0, 100 + number)
    other = replace(placed, node=f"{node}-other", rank=1, pid=500 + number)
    scraped = max(len(values) for values in scene.series.values())
    for name, values in scene.series.items():
        if name.partition("{")[0] in read:
            found[renamed(name, node, 0, placed)] = _padded(values, minutes)
            if scene.fault.ends != "exited":
                alive, newest = values[: scene.at - 2], values[scene.at - 30 : scene.at - 2]
                going_on = np.concatenate([alive, np.tile(newest, minutes // len(newest) + 1)])
                found[renamed(name, other.node, 0, other)] = going_on[:minutes]
    up = np.full(scraped, 1.0)
    if scene.fault.is_down:
        up[scene.at :] = 0.0
    found[f'up{{job="torchmem",instance="{node}:9847"}}'] = _padded(up, minutes)
    if scene.fault.ends != "exited":
        name = f'up{{job="torchmem",instance="{other.node}:9847"}}'
        found[name] = np.ones(minutes)
    return found


def _padded(values: Values, minutes: int) -> Values:
    return np.concatenate([values, np.full(max(0, minutes - len(values)), np.nan)])[:minutes]


def _told(scene: Scene, number: int, found: list[Fired]) -> Told:
    """Return the first of the alerts that must tell a fault, and what else fired on its node."""
    node = f"fault{number:02}"
    own = [each for each in found if dict(each.labels).get("instance", "").startswith(node)]
    right = sorted((e for e in own if e.alert in scene.fault.alerts), key=lambda e: e.first)
    first = right[0] if right else None
    begins = scene.at if scene.died is None else 0
    return Told(
        scene.fault.name,
        scene.seed,
        scene.fault.within,
        first.alert if first else None,
        first.first - scene.at if first else None,
        tuple(sorted({e.alert for e in own if e.alert not in scene.fault.alerts})),
        tuple(sorted({e.alert for e in own if e.first < begins})),
    )
