"""The recordings that the dashboards are drawn from, by name.

All end at the same time, and equal sources give equal recordings.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pictures.history import History, Scrapes, prometheus
from pictures.nodes import GIB, Node, NodePlan, OtherProcess
from pictures.rules import evaluate
from pictures.training import Life

from torchmem.sample.sample import State

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("tests/pictures", "sdk/src", "exporter/src", "tools/src", "prometheus/rules")
BUILD = ROOT / "build" / "pictures"

END = 1_772_460_000.0
"""2026-03-02 14:00 UTC."""
MINUTE = 60.0
START = END - 100 * MINUTE
FLUSH_EVERY = 30


@dataclass(frozen=True, slots=True)
class Recording:
    """Nodes from `start` to END, scraped every `interval` seconds."""

    nodes: Callable[[], Sequence[NodePlan]]
    about: str
    start: float = START
    interval: int = 10


def _ago(minutes: float) -> float:
    return END - minutes * MINUTE


def _job(
    run: str,
    scenario: str,
    ranks: int,
    start: float,
    end: float,
    *,
    ending: State = "running",
    steps: int = 600,
    pid: int = 4100,
    step_seconds: float = 5.0,
    endings: Mapping[int, State] = {},
) -> list[tuple[int, Life]]:
    """Return one process per rank, each on the GPU of its number."""
    return [
        (
            rank,
            Life(
                scenario,
                run,
                rank,
                ranks,
                pid + 7 * rank,
                start,
                end,
                endings.get(rank, ending),
                steps,
                step_seconds,
            ),
        )
        for rank in range(ranks)
    ]


def _restarted() -> list[tuple[int, Life]]:
    """Four ranks, restarted three times: after an OOM, after a SIGKILL, and by hand."""
    run = "finetune-7b"
    oom = _job(run, "fragmentation", 4, _ago(75), _ago(30), ending="failed", steps=420)
    killed = _job(run, "variable-length", 4, _ago(40), _ago(27), pid=7405, endings={1: "killed"})
    stopped = _job(run, "healthy-slack", 4, _ago(25), _ago(19), ending="exited", pid=9120)
    now = _job(run, "leak", 4, _ago(17), END + 1, pid=12880, steps=420)
    return [*oom, *killed, *stopped, *now]


def _one_rank() -> Sequence[NodePlan]:
    return [NodePlan("node1:9847", 1, _job("gpt2", "variable-length", 1, _ago(100), END + 1))]


def _restarts() -> Sequence[NodePlan]:
    others = [
        OtherProcess(4, 2210, 57 * GIB, START, END + 1),
        OtherProcess(5, 2391, 11 * GIB, START, END + 1),
    ]
    return [NodePlan("node1:9847", 8, _restarted(), others)]


def _no_gpu() -> Sequence[NodePlan]:
    return [
        NodePlan("login1:9847", 0, down="library_not_found"),
    ]


RECORDINGS: Mapping[str, Recording] = {
    "one-rank": Recording(_one_rank, "one rank on one GPU"),
    "restarts": Recording(_restarts, "four ranks with three restarts, on a node of eight GPUs"),
    "no-gpu": Recording(_no_gpu, "a node whose NVML does not answer"),
}


@contextmanager
def served(name: str) -> Iterator[str]:
    """Run a Prometheus that holds the recording; yield its URL. Recordings are kept in build."""
    folder = BUILD / "data" / f"{name}-{_fingerprint()}"
    if not (folder / "complete").exists():
        for old in (BUILD / "data").glob(f"{name}-*"):
            shutil.rmtree(old)
        with prometheus(folder) as url:
            record(RECORDINGS[name], url)
        (folder / "complete").touch()
    with prometheus(folder) as url:
        yield url


def record(recording: Recording, url: str) -> None:
    """Play a recording into a Prometheus."""
    history = History(url)
    nodes = [(Node(plan, recording.start), Scrapes(history)) for plan in recording.nodes()]
    ticks = range(int(recording.start) * 1000, int(END) * 1000 + 1, recording.interval * 1000)
    for number, tick in enumerate(ticks):
        for node, scrapes in nodes:
            node.play(tick / 1000)
            scrapes.add(tick, node.scrape())
        if number % FLUSH_EVERY == 0:
            history.flush()
    history.flush()
    for node, _ in nodes:
        node.exporter.close()
    evaluate(history, ticks)


def _fingerprint() -> str:
    """Return a hash of everything that a recording is made by."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".yml"}:
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
