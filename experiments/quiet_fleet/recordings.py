"""What a minute's scrapes of one GPU return while one process uses it, kept in files.

A recording has a body, which ends with the process, and a tail, while the exporter still shows it.
A job that lasts longer goes on as the second half of its body, again and again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from experiments.prediction.jobs import HOUR, Job, job
from experiments.quiet_fleet.node import KEPT_SECONDS, Card, HowItEnds, Node, Trainer

from torchmem.allocator.sizes import GIB
from torchmem.exporter.subjects.processes import ProcessMemory

Values = npt.NDArray[np.float64]
DAY_MINUTES = 1440
CARD_BYTES = 80 * GIB
SERVERS = {"vllm": "VLLM::EngineCore", "sglang": "sglang::scheduler", "triton": "tritonserver"}
_PID = re.compile(r'pid="(?!4194305)\d+"')
_LAUNCH = re.compile(r'launch="[^"]*"')
_MOVES = ("_total", "_sum", "_count", "_timestamp_seconds")
"""Ends of the names whose values go on rising when a job goes on."""


@dataclass(frozen=True, slots=True, order=True)
class Workload:
    """What uses a GPU. `kind` is one of `experiments.prediction.jobs`, or says that it has no SDK.

    `share`: of the card that a process without SDK holds. `is_other`: a rank with the parameters
    of the run, and batches of its own. `hours`: how long the body is.
    """

    kind: str
    seed: int = 0
    ends: HowItEnds = "exited"
    hours: float = 24.0
    share: float = 0.0
    is_other: bool = False

    @property
    def file_name(self) -> str:
        """The name of the recording's file."""
        words = (self.kind, self.seed, self.ends, f"{self.hours:g}", f"{self.share:g}")
        return "-".join(map(str, words)).replace(" ", "-") + "-other" * self.is_other

    @property
    def made(self) -> Job:
        """The training job, on a card of the fleet's size: the first that follows the seed."""
        seeds = range(self.seed * 1000, self.seed * 1000 + 1000)
        seed = next(s for s in seeds if job(self.kind, s).scenario.gpu_bytes == CARD_BYTES)
        return job(self.kind, seed, is_earlier=self.is_other)


@dataclass(frozen=True, slots=True)
class Recording:
    """Values of each series in each minute, NaN where a scrape lacks it; `body` is its minutes."""

    body: int
    series: Mapping[str, Values]

    def lasting(self, name: str, loops: int) -> Values:
        """Return the values of a series of a job that goes on for more halves of the body."""
        values, half = self.series[name], self.body // 2
        body, tail = values[: self.body], values[self.body :]
        metric = name.partition("{")[0]
        drift = 0.0
        if metric.endswith(_MOVES) and half:
            risen = float(body[-1] - body[-1 - half])
            drift = 0.0 if np.isnan(risen) else risen
        again = body[len(body) - half :]
        if metric.endswith("_peak_bytes"):
            again = np.maximum(again, body[-1])
        more = [again + drift * number for number in range(1, loops + 1)]
        return np.concatenate([body, *more, tail + drift * loops])

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the process died of an OutOfMemoryError, so that the job was not healthy."""
        states = (v for name, v in self.series.items() if 'state="oom"' in name)
        return any(np.nanmax(values) == 1 for values in states)

    def minutes(self, loops: int) -> int:
        """Return how many minutes the process lives."""
        return self.body + loops * (self.body // 2)


def recorded(workload: Workload, folder: Path) -> Recording:
    """Return a recording; it is made if the folder lacks it."""
    file = folder / f"{workload.file_name}.npz"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        body, series = _record(workload)
        written = file.with_suffix(".part.npz")
        np.savez_compressed(written, body=np.array([body]), **series)  # type: ignore[arg-type]
        written.rename(file)
    return _read(file)


@cache
def _read(file: Path) -> Recording:
    with np.load(file) as arrays:
        series = dict(arrays)
    return Recording(int(series.pop("body")[0]), series)


def record_all(workloads: set[Workload], folder: Path) -> None:
    """Make the recordings that the folder lacks, on all cores."""
    missing = [
        each for each in sorted(workloads) if not (folder / f"{each.file_name}.npz").exists()
    ]
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(partial(_make, folder), missing):
            pass


def _make(folder: Path, workload: Workload) -> None:
    recorded(workload, folder)


def _record(workload: Workload) -> tuple[int, dict[str, Values]]:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        node = Node(Path(folder), stack, Card(CARD_BYTES))
        if workload.kind in SERVERS or workload.kind in ("idle", "notebook", "driver down"):
            body = _watched(node, workload)
        else:
            trainer = Trainer(node, workload.made, workload.ends, workload.hours * HOUR)
            trainer.play()
            body = node.scrapes - round(KEPT_SECONDS / 60)
        return body, arrays(node)


def arrays(node: Node) -> dict[str, Values]:
    """Return what was scraped, by series whose pid and launch have general names."""
    found: dict[str, Values] = {}
    for name, values in node.series.items():
        renamed = _LAUNCH.sub('launch="L"', _PID.sub('pid="P"', name))
        into = found.setdefault(renamed, np.full(node.scrapes, np.nan))
        into[list(values)] = list(values.values())
    return found


def _watched(node: Node, workload: Workload) -> int:
    """Watch a GPU without SDK for a day."""
    process = SERVERS.get(workload.kind, "python")
    if workload.kind in SERVERS or workload.kind == "notebook":
        held = int(workload.share * CARD_BYTES)
        node.card.held = [ProcessMemory(node.process(process).pid, held)]
    node.card.down = "driver_mismatch" if workload.kind == "driver down" else None
    busy = _busy(workload)
    node.fault = lambda _: setattr(node.card, "busy", next(busy))
    node.watch(workload.hours * HOUR)
    return node.scrapes


def _busy(workload: Workload) -> Iterator[float]:
    """Yield the utilization in each minute: of requests, of cells that someone runs, or none."""
    rng = Random(f"{workload.file_name}")  # noqa: S311 -- a workload, not a secret
    night = rng.randrange(DAY_MINUTES)
    minute = 0
    while True:
        asleep = (minute - night) % DAY_MINUTES < 7 * 60
        if workload.kind in SERVERS:
            used = rng.random() < (0.02 if asleep else 0.7)
        elif workload.kind == "notebook":
            used = (minute - night) % DAY_MINUTES > 15 * 60 and minute // 20 % 3 == 0
        else:
            used = False
        yield rng.uniform(0.2, 0.9) if used else 0.0
        minute += 1
