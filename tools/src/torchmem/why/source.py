"""The records that answers are made of, from a run directory or from an exporter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torchmem.node.ranks import ProcessFilter
from torchmem.node.state import GpuState, LastOom, NodeState, OomWhy, RankState, RankWhy

MAX_REPORTS = 50
"""The newest OOM reports that are looked at, and that an assistant gets."""


@dataclass(frozen=True, slots=True)
class FoundRank:
    """A rank on a GPU; `time` is when it was read, in Unix seconds."""

    gpu: GpuState
    rank: RankState
    time: float

    def __str__(self) -> str:
        return f"rank {self.rank.rank} of run {self.rank.run} (pid {self.rank.pid})"


@dataclass(frozen=True, slots=True)
class OomRow:
    """One OutOfMemoryError of a rank. `file` is its report, which only a run directory shows.

    `headline`: the verdict; cause and onset where there is no report.
    """

    run: str
    launch: str | None
    rank: int | None
    pid: int | None
    oom: LastOom
    headline: str
    file: str | None = None

    def data(self) -> dict[str, Any]:
        """Return the fields, with those of the error beside those of the rank."""
        fields = {
            name: getattr(self, name)
            for name in ("run", "launch", "rank", "pid", "file", "headline")
        }
        return {**fields, **oom_data(self.oom)}


def oom_data(oom: LastOom) -> dict[str, Any]:
    """Return an OutOfMemoryError for JSON. Its line stands for the function, too."""
    return {name: value for name, value in asdict(oom).items() if name != "function"}


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A snapshot that read_snapshot can read, and when it was written, in Unix seconds."""

    file: str
    time: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """What explains an OutOfMemoryError, and the lines that leak according to a recording."""

    row: OomRow
    oom: OomWhy
    leaks: Sequence[dict[str, Any]] = ()


class NodeSource(Protocol):
    """A run directory or an exporter. Every method raises TorchmemError if it has no answer.

    `elsewhere`: how to name another one.
    """

    name: str
    elsewhere: str

    def node(self) -> NodeState:
        """Return the state of the node."""

    def why(self, found: FoundRank) -> RankWhy:
        """Return why the memory of a rank is as it is."""

    def recordings(self, found: FoundRank) -> Sequence[SnapshotFile]:
        """Return the recordings of a rank that this machine has."""

    def reports(self, limit: int | None) -> Sequence[OomRow]:
        """Return the newest OOM reports on this machine, at most `limit`, the newest first."""

    def explain(self, file: str) -> Explanation:
        """Explain a report on this machine."""

    def rank_page(
        self, found: Sequence[FoundRank], whys: Sequence[RankWhy], pages: Sequence[str]
    ) -> Callable[[], bytes] | None:
        """Return what writes the HTML page of a rank on its GPUs; None from another machine.

        `pages`: its text on each GPU.
        """

    def oom_page(self, found: Explanation) -> Callable[[], bytes] | None:
        """Return what writes the page of an OutOfMemoryError, likewise."""


def ranks_on_gpus(node: NodeState) -> list[FoundRank]:
    """Return the ranks that use a GPU, once for each of them."""
    now = node.time or 0.0
    return [FoundRank(gpu, rank, now) for gpu in node.gpus for rank in gpu.ranks]


def selects(selected: ProcessFilter, rank: RankState | OomRow) -> bool:
    """Return whether a rank, or that of an OutOfMemoryError, has all that is asked for."""
    return (
        selected.rank in {None, rank.rank}
        and selected.run in {None, rank.run}
        and selected.launch in {None, rank.launch}
        and selected.pid in {None, rank.pid}
    )
