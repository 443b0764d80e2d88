"""Which jobs run where and when in the fleet, drawn by seed: 52 nodes of 8 GPUs.

Times are in minutes since the first midnight, a Monday's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Literal
from zlib import crc32

from experiments.quiet_fleet.node import HowItEnds
from experiments.quiet_fleet.recordings import DAY_MINUTES, Workload

GPUS = 8
HOUR = 60
Outage = Literal["reboot", "driver", "gap", "prometheus"]
"""A node is away; its driver is replaced; a scrape fails; Prometheus itself is away."""
GROUPS = {"pretraining": 3, "tuning": 6, "research": 6, "rl": 3, "serving": 15, "notebooks": 8}
"""Nodes by what they are used for; the rest, up to NODES, is seldom used."""
NODES = 52
USERS = 40
VARIANTS = 12
"""Workloads of each kind: few, so that few recordings are made, and none decides the result."""
TUNED: tuple[HowItEnds, ...] = ("exited", "exited", "exited", "killed")
TRIED: tuple[HowItEnds, ...] = ("exited", "exited", "killed")


@dataclass(frozen=True, slots=True)
class Placed:
    """A process on a GPU. It goes on for `loops` more halves of its recording's body."""

    workload: Workload
    node: str
    gpu: int
    start: int
    loops: int
    run: str
    launch: str
    rank: int
    pid: int


@dataclass(slots=True)
class Fleet:
    """All that happens in some days. `outages`: kind, node (or "": all), first minute, minutes."""

    days: int
    nodes: list[str] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    outages: list[tuple[Outage, str, int, int]] = field(default_factory=list)

    @property
    def minutes(self) -> int:
        """How long it is watched."""
        return self.days * DAY_MINUTES


class Planner:
    """Draws a fleet; equal seeds give equal fleets."""

    def __init__(self, seed: int, days: int, nodes: int = NODES) -> None:
        self.seed, self.fleet = seed, Fleet(days)
        self.rng = Random(f"quiet fleet {seed}")  # noqa: S311 -- a workload, not a secret
        self._pids, self._launches = count(1000), count(1)
        self._scale = nodes / NODES

    def plan(self) -> Fleet:
        """Return the fleet."""
        names = (f"gpu{number:02}" for number in count())
        for group, number in GROUPS.items():
            size = max(1, round(number * self._scale))
            nodes = [next(names) for _ in range(size)]
            self.fleet.nodes += nodes
            getattr(self, f"_{group}")(nodes)
        rest = max(1, round(NODES * self._scale) - len(self.fleet.nodes))
        spare = [next(names) for _ in range(rest)]
        self.fleet.nodes += spare
        self._seldom(spare)
        self._maintain(spare)
        return self.fleet

    # --- Jobs

    def _run(
        self, where: list[tuple[str, int]], start: int, name: str, first: Workload, loops: int
    ) -> int:
        """Place a run, one rank on each GPU; return when its ranks end.

        All runs of a name are of one user.
        """
        launch = f"{1000 + crc32(name.encode()) % USERS}-{next(self._launches):08x}"
        return self._ranks(where, start, name, launch, first, loops=loops)

    def _ranks(  # noqa: PLR0913 -- what a launch consists of
        self,
        where: list[tuple[str, int]],
        start: int,
        name: str,
        launch: str,
        first: Workload,
        *,
        loops: int,
        others_end: HowItEnds | None = None,
    ) -> int:
        other = Workload(first.kind, first.seed, others_end or first.ends, first.hours, 0, True)
        for rank, (node, gpu) in enumerate(where):
            made = other if rank else first
            pid = next(self._pids)
            self.fleet.placed.append(Placed(made, node, gpu, start, loops, name, launch, rank, pid))
        minutes = round(first.hours * HOUR)
        return start + minutes + loops * (minutes // 2)

    def _workload(self, kind: str, ends: HowItEnds = "exited") -> Workload:
        """Return one of the workloads of a kind."""
        number = self.rng.randrange(VARIANTS)
        hours = (1.5, 2.5, 4.0, 3.0)[number % 4]
        return Workload(kind, 100 * self.seed + number, ends, hours)

    def _pretraining(self, nodes: list[str]) -> None:
        """One run on all GPUs, which torchrun starts again after a rank failed, every few days."""
        where = [(node, gpu) for node in nodes for gpu in range(GPUS)]
        name, start = "llm-pretraining", 8 * HOUR
        launch = f"1007-{next(self._launches):08x}"
        fails = Workload("stable", 100 * self.seed, "failed", 4.0)
        while start < self.fleet.minutes:
            loops = self.rng.randint(8, 40)
            end = self._ranks(where, start, name, launch, fails, loops=loops, others_end="killed")
            start = end + 1

    def _tuning(self, nodes: list[str]) -> None:
        """Runs of 4 or 8 GPUs by day, with evaluation and checkpoints; nights are often idle."""
        for node in nodes:
            for half in (0, 4):
                where = [(node, gpu) for gpu in range(half, half + 4)]
                for day in range(self.fleet.days):
                    start = day * DAY_MINUTES + self.rng.randint(8 * HOUR, 14 * HOUR)
                    ends = self.rng.choice(TUNED)
                    kind = self.rng.choice(("evaluation", "evaluation", "curriculum stops"))
                    made = self._workload(kind, ends)
                    self._run(
                        where, start, f"tune-{made.seed}-{kind[:4]}", made, self.rng.randint(0, 3)
                    )

    def _research(self, nodes: list[str]) -> None:
        """Single GPUs: batch-size searches, other experiments, canceled and failing scripts."""
        kinds = ("search", "search", "variable lengths", "tight", "steady cache")
        for node in nodes:
            for gpu in range(GPUS):
                for day in range(self.fleet.days):
                    if self.rng.random() < 0.4:
                        continue
                    start = day * DAY_MINUTES + self.rng.randint(9 * HOUR, 18 * HOUR)
                    if self.rng.random() < 0.3:
                        crash = Workload("stable", 100 * self.seed + 50, "failed", 0.1)
                        start = self._run([(node, gpu)], start, "try", crash, 0) + 3
                    kind = self.rng.choice(kinds)
                    ends = self.rng.choice(TRIED)
                    made = self._workload(kind, ends)
                    self._run([(node, gpu)], start, f"exp-{made.seed}-{kind[:4]}", made, 0)

    def _rl(self, nodes: list[str]) -> None:
        """Generation and training in turns on whole nodes, for one or two days each."""
        for node in nodes:
            where = [(node, gpu) for gpu in range(GPUS)]
            start = self.rng.randint(0, 12 * HOUR)
            while start < self.fleet.minutes:
                made = self._workload(self.rng.choice(("steady phases", "phases stops")))
                start = self._run(where, start, f"rl-{made.seed}", made, self.rng.randint(6, 20))
                start += self.rng.randint(20, 20 * HOUR)

    def _without_sdk(self, node: str, gpu: int, made: Workload, start: int = 0) -> None:
        """Place a process that goes on to the end."""
        loops = 2 * self.fleet.days
        pid = next(self._pids)
        self.fleet.placed.append(Placed(made, node, gpu, start, loops, "", "", 0, pid))

    def _serving(self, nodes: list[str]) -> None:
        """Servers without SDK, at 92% of the card, or flat at 98%."""
        for node in nodes:
            kind, share = self.rng.choice((("vllm", 0.92), ("sglang", 0.88), ("triton", 0.98)))
            for gpu in range(GPUS):
                seed = self.rng.randrange(4)
                self._without_sdk(node, gpu, Workload(kind, seed, share=share))

    def _notebooks(self, nodes: list[str]) -> None:
        """Notebooks without SDK that are used in the afternoon and left open at night."""
        for node in nodes:
            for gpu in range(GPUS):
                if self.rng.random() < 0.7:
                    seed = self.rng.randrange(4)
                    opened = self.rng.randint(0, 3 * DAY_MINUTES)
                    made = Workload("notebook", seed, share=0.1 + 0.1 * seed)
                    self._without_sdk(node, gpu, made, opened)

    def _seldom(self, nodes: list[str]) -> None:
        """Idle nodes, with a short job now and then."""
        for node in nodes:
            for day in range(self.fleet.days):
                if self.rng.random() < 0.4:
                    where = [(node, gpu) for gpu in range(self.rng.choice((1, 2, 8)))]
                    start = day * DAY_MINUTES + self.rng.randint(0, 18 * HOUR)
                    made = self._workload("variable lengths")
                    self._run(where, start, f"batch-{made.seed}", made, 0)

    # --- Maintenance

    def _maintain(self, spare: list[str]) -> None:
        """Reboot drained nodes, replace their drivers; let scrapes fail, and Prometheus start."""
        fleet = self.fleet
        for node in spare:
            at = self.rng.randint(1, fleet.days) * DAY_MINUTES - self.rng.randint(30, 120)
            fleet.outages.append(("reboot", node, at, self.rng.randint(4, 12)))
            at = self.rng.randint(1, fleet.days) * DAY_MINUTES - self.rng.randint(150, 240)
            fleet.outages.append(("driver", node, at, self.rng.randint(3, 8)))
        for node in fleet.nodes:
            for at in self._times(fleet.days / 3):
                fleet.outages.append(("gap", node, at, 1))
        for at in self._times(fleet.days / 5):
            fleet.outages.append(("prometheus", "", at, 3))

    def _times(self, number: float) -> Iterator[int]:
        for _ in range(max(1, round(number))):
            yield self.rng.randrange(self.fleet.minutes)
