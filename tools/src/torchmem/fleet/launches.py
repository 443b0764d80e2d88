"""The launches of runs, and how they ended, from what the store knows about each process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from torchmem.explain.thresholds import defaults
from torchmem.sample.sample import LIVE_STATES

ALIVE_SECONDS = 900.0
"""A process that has written nothing for so long, without an end, has disappeared."""

Outcome = Literal["running", "exited", "oom", "host_memory", "failed", "killed", "disappeared"]
OUTCOMES: Mapping[Outcome, str] = {
    "oom": "ran out of GPU memory",
    "host_memory": "killed because host memory was full",
    "failed": "failed with an exception or an exit code",
    "killed": "killed by a signal",
    "disappeared": "disappeared without an end",
    "exited": "finished",
    "running": "still running",
}
"""How a launch ended, the one that explains most first."""


@dataclass(frozen=True, slots=True)
class OomEnd:
    """The OOM that a rank died of: Unix time, cause, and what is known of onset and remedy."""

    timestamp: float
    cause: str
    onset: str | None
    remedy: str | None


@dataclass(frozen=True, slots=True)
class RunProcess:
    """One process of a run: Unix times of its start and its last sample, and its last state.

    `launch` is the label, "" if it has none.
    """

    job: str
    run: str
    rank: str
    start: float
    seen: float
    state: str
    steps: float | None = None
    kill_cause: str | None = None
    oom: OomEnd | None = None
    launch: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Job, run and launch."""
        return self.job, self.run, self.launch

    @property
    def uid(self) -> str:
        """The ID of the user, with which a launch begins."""
        return self.launch.partition("-")[0]

    def outcome(self, now: float) -> Outcome:
        """Return how it ended, as seen at the time `now`."""
        if self.oom or self.state == "oom":
            return "oom"
        if self.state in LIVE_STATES:
            return "running" if now - self.seen < ALIVE_SECONDS else "disappeared"
        if self.kill_cause == "host_memory":
            return "host_memory"
        return self.state  # type: ignore[return-value]  # exited, failed or killed


@dataclass(frozen=True, slots=True)
class Launch:
    """The processes of a launch from one start to the next."""

    processes: Sequence[RunProcess]

    @property
    def start(self) -> float:
        """When its first process started."""
        return min(process.start for process in self.processes)

    @property
    def end(self) -> float:
        """When its last process was seen."""
        return max(process.seen for process in self.processes)

    @property
    def steps(self) -> float | None:
        """Steps of the rank that made most; None if unknown."""
        return max((p.steps for p in self.processes if p.steps is not None), default=None)

    @property
    def oom(self) -> OomEnd | None:
        """The first OOM that a rank died of."""
        ends = [process.oom for process in self.processes if process.oom]
        return min(ends, key=lambda end: end.timestamp, default=None)

    def outcome(self, now: float) -> Outcome:
        """Return how it ended: what happened to one rank ends the others."""
        first: dict[Outcome, float] = {}
        for process in self.processes:
            outcome = process.outcome(now)
            first[outcome] = min(process.seen, first.get(outcome, process.seen))
        if first.keys() <= {"exited", "running"}:
            return "running" if "running" in first else "exited"
        # When a rank fails, its launcher kills the others soon after.
        stopped = float(defaults().values["stopped_seconds"])
        if "failed" in first and first.get("killed", now) < first["failed"] - stopped:
            del first["failed"]
        return next(outcome for outcome in OUTCOMES if outcome in first)

    def gpu_hours(self, since: float) -> float:
        """Return for how long its ranks ran after `since`, until one of them ran out of memory."""
        stop = self.oom.timestamp if self.oom else self.end
        spans = (min(p.seen, stop) - max(p.start, since) for p in self.processes)
        return sum(max(0.0, span) for span in spans) / 3600


def launches(processes: Iterable[RunProcess]) -> Iterator[list[Launch]]:
    """Yield the launches of each run of a user, the oldest first.

    Two users can have runs of the same name. A launch ends where one of its ranks starts again.
    """

    def run(process: RunProcess) -> tuple[str, str, str]:
        return process.job, process.run, process.uid

    def launch(process: RunProcess) -> str:
        return process.launch

    ordered = sorted(processes, key=lambda it: (run(it), it.launch, it.start, it.rank))
    for _, of_run in groupby(ordered, run):
        groups = (group for _, each in groupby(of_run, launch) for group in _starts(each))
        yield sorted(map(Launch, groups), key=lambda launch: launch.start)


def _starts(ordered: Iterable[RunProcess]) -> Iterator[list[RunProcess]]:
    group: list[RunProcess] = []
    ranks: set[str] = set()
    for process in ordered:
        if process.rank in ranks:
            yield group
            group, ranks = [], set()
        group.append(process)
        ranks.add(process.rank)
    yield group
