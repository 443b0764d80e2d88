"""The recordings that the dashboards are drawn from: which nodes, and what happens on them.

All end at the same time, and equal sources give equal recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from docs.generate.pictures.nodes import GIB, NodePlan, OtherProcess
from docs.generate.pictures.serving import EngineLife
from docs.generate.pictures.training import Life

from torchmem.allocator.settings import WITHDRAWN
from torchmem.sample.sample import State

END = 1_772_460_000.0
"""2026-03-02 14:00 UTC."""
GPUS = 8

Lives = list[tuple[int, Life]]


def ago(minutes: float) -> float:
    """Return the time that many minutes before the end."""
    return END - 60 * minutes


@dataclass(frozen=True, slots=True)
class Recording:
    """Nodes from `start` to END (Unix seconds), scraped every `interval` seconds."""

    about: str
    nodes: Callable[[], Sequence[NodePlan]]
    start: float = ago(80)
    interval: int = 20


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks of one scenario, from `start` to `end`; `endings` are states after it, by rank."""

    run: str
    scenario: str
    ranks: int
    start: float
    end: float = END + 1
    ending: State = "running"
    endings: Mapping[int, State] | None = None
    steps: int = 600
    step_seconds: float = 5.0
    first_pid: int = 4100
    snapshot_seconds: float = 40.0
    advice: str = ""
    user: str = ""
    team: str = ""

    def lives(self, ranks: range | None = None, first_gpu: int = 0) -> Lives:
        """Return the processes of some of the ranks, by default all, on one GPU each."""
        chosen = ranks or range(self.ranks)
        return [(first_gpu + place, self._life(rank)) for place, rank in enumerate(chosen)]

    def _life(self, rank: int) -> Life:
        return Life(
            self.scenario,
            self.run,
            rank,
            self.ranks,
            pid=self.first_pid + 7 * rank,
            start=self.start,
            end=self.end,
            ending=(self.endings or {}).get(rank, self.ending),
            steps=self.steps,
            step_seconds=self.step_seconds,
            snapshot_seconds=self.snapshot_seconds,
            advice=self.advice,
            user=self.user,
            team=self.team,
        )


def _one_rank() -> Sequence[NodePlan]:
    job = Job("gpt2", "variable-length", 1, ago(80))
    return [NodePlan("node1:9847", 1, job.lives())]


def _restarted() -> Lives:
    """Return four ranks that were restarted after an OOM, after a SIGKILL, and by hand."""
    job = partial(Job, "mistral_24b_finetune", ranks=4)
    jobs = [
        job("fragmentation", start=ago(75), steps=420),
        job(
            "variable-length",
            start=ago(40),
            end=ago(27),
            endings={1: "killed"},
            first_pid=7405,
            advice="expandable_segments:True",
        ),
        job(
            "healthy-slack",
            start=ago(25),
            end=ago(19),
            ending="exited",
            first_pid=9120,
            advice=WITHDRAWN,
        ),
        job("leak", start=ago(17), steps=420, first_pid=12880),
    ]
    return [life for each in jobs for life in each.lives()]


def _restarts() -> Sequence[NodePlan]:
    others = [
        OtherProcess(4, 2210, 57 * GIB, ago(80), END + 1, level=0.6),
        OtherProcess(5, 2391, 11 * GIB, ago(80), END + 1),
        OtherProcess(6, 2402, 30 * GIB, ago(80), END + 1, level=0.9),
        OtherProcess(7, 2417, 3 * GIB, ago(80), ago(35)),
    ]
    # Names of 20 characters, as long as many are, which no column may cut.
    return [NodePlan("dgx-h100-node07:9847", GPUS, _restarted(), others, mig=True)]


def _many(ranks: int, minutes: float) -> Sequence[NodePlan]:
    """Return nodes with a rank on each GPU; few steps and snapshots, for many ranks take long."""
    job = Job(
        "pretrain",
        "variable-length",
        ranks,
        ago(minutes),
        steps=int(2.4 * minutes),
        step_seconds=30.0,
        snapshot_seconds=60.0,
    )
    return [
        NodePlan(
            f"node{host + 1}:9847",
            GPUS,
            job.lives(range(host * GPUS, (host + 1) * GPUS)),
            host=host,
            healthy=True,
            lean=True,
        )
        for host in range(ranks // GPUS)
    ]


def _fleet() -> Sequence[NodePlan]:
    """Return nodes that are well, wasteful, sick, without GPU, and out of reach."""
    node = partial(NodePlan, gpus=GPUS, lean=True)
    job = partial(Job, step_seconds=30.0, steps=140, snapshot_seconds=120.0)
    pretrain = job("pretrain-13b", "healthy-slack", 16, ago(70), first_pid=20400)
    pretrain = replace(pretrain, user="mia", team="language")
    tune = job("rlhf-7b", "rl-phases", 4, ago(60), first_pid=31200, user="leo", team="language")
    leak = job("vision-ssl", "leak", 4, ago(35), step_seconds=15.0, steps=170, first_pid=8800)
    leak = replace(leak, user="ada", team="vision")
    idle = [OtherProcess(gpu, 5100 + gpu, 24 * GIB, ago(80), END + 1) for gpu in (4, 5)]
    return [
        node("node1:9847", lives=pretrain.lives(range(8)), host=0, healthy=True),
        node("node2:9847", lives=pretrain.lives(range(8, 16)), host=1, healthy=True),
        node("node3:9847", lives=tune.lives(), others=idle, host=2, healthy=True),
        node("node4:9847", lives=leak.lives(), host=3, lean=False, lost=(7, ago(12))),
        node("node5:9847", host=4, healthy=True, gone=ago(9)),
        NodePlan("node6:9847", 0, down="library_not_found"),
    ]


def _serving() -> Sequence[NodePlan]:
    """Return two ranks of an engine beside a trainer that takes turns with them.

    Both sleep at the end; then the second one can't wake up.
    """
    lives = [
        (
            rank,
            EngineLife(
                "",
                "Qwen3-8B",
                rank,
                2,
                pid=5200 + rank,
                start=ago(79),
                end=END + 1,
                step_seconds=4.0,
                snapshot_seconds=40.0,
                leaks=rank == 1,
            ),
        )
        for rank in range(2)
    ]
    others = [
        *(OtherProcess(gpu, 6100 + gpu, 12 * GIB, ago(80), END + 1, level=0.4) for gpu in range(2)),
        OtherProcess(1, 6188, 21 * GIB, ago(2), END + 1),
    ]
    return [NodePlan("node1:9847", 2, lives, others, healthy=True)]


def _no_gpu() -> Sequence[NodePlan]:
    return [NodePlan("login1:9847", 0, down="library_not_found")]


RECORDINGS: Mapping[str, Recording] = {
    "one-rank": Recording("one rank on one GPU", _one_rank),
    "restarts": Recording("four ranks with three restarts, on a node of eight GPUs", _restarts),
    "ranks-64": Recording("64 ranks on eight nodes", lambda: _many(64, 16), ago(16)),
    "ranks-1024": Recording("1,024 ranks on 128 nodes", lambda: _many(1024, 16), ago(16)),
    "fleet": Recording("six nodes with three jobs", _fleet, ago(72), interval=30),
    "serving": Recording("an engine that serves and sleeps", _serving),
    "no-gpu": Recording("a node whose NVML does not respond", _no_gpu, ago(65)),
    "empty": Recording("no exporter at all", list, ago(65)),
}
