"""The ranks of a node in rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from torchmem.allocator.sizes import format_index, format_size
from torchmem.mcp.answer import ToolAnswer
from torchmem.output.terminal import aligned, joined
from torchmem.top.node import Gpu, Node, Rank
from torchmem.top.view import is_live

HEADER = ("run", "launch", "rank", "pid", "GPU", "state", "allocated", "reserved", "headroom", "FI")
NO_RANKS = "No ranks: start one with `torchmem run -- python train.py`."


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank on one GPU; what is unknown is None.

    `gpu` is NVML's index. `headroom_bytes` is the largest request that succeeds, if need be after a
    flush of the cache. `verdict`: how the rank ended, or while it runs, what threatens it.
    """

    run: str
    launch: str | None
    rank: int | None
    world_size: int | None
    pid: int | None
    state: str
    is_live: bool
    gpu: int | None = None
    uuid: str | None = None
    gpu_name: str | None = None
    total_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    headroom_bytes: int | None = None
    fragmentation_ratio: float | None = None
    verdict: tuple[str, ...] = ()


def answer(rows: Iterable[RankRow], source: str, run: str | None) -> ToolAnswer:
    """Return the ranks of a run, or of all, those that have ended last."""
    chosen = sorted(
        (row for row in rows if run in {None, row.run}),
        key=lambda row: (not row.is_live, row.run, row.launch or "", row.rank or 0, row.gpu or 0),
    )
    threatened = [f"  {_who(row)}: {row.verdict[0]}" for row in chosen if row.verdict]
    table = list(aligned([HEADER, *map(_cells, chosen)])) if chosen else [NO_RANKS]
    sections = [[f"Ranks of {source}"], table, threatened and ["Verdicts", *threatened]]
    data = {"source": source, "ranks": [asdict(row) for row in chosen]}
    return ToolAnswer(joined(sections), data, "Pass `run`.")


def _who(row: RankRow) -> str:
    return f"rank {_text(row.rank)} of run {row.run}, GPU {_text(row.gpu)}"


def _cells(row: RankRow) -> Sequence[str]:
    ratio = row.fragmentation_ratio
    return (
        row.run,
        row.launch or "-",
        _text(row.rank),
        _text(row.pid),
        _text(row.gpu),
        row.state,
        _size(row.allocated_bytes),
        _size(row.reserved_bytes),
        _size(row.headroom_bytes),
        "-" if ratio is None else format_index(ratio),
    )


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)


def _size(size: int | None) -> str:
    return "-" if size is None else format_size(size)


def of_node(node: Node) -> Iterator[RankRow]:
    """Yield the ranks of a node, also those that have used no GPU yet."""
    yield from (_row(gpu, rank) for gpu in node.gpus for rank in gpu.ranks)
    yield from (_row(Gpu(), rank) for rank in node.waiting)


def _row(gpu: Gpu, rank: Rank) -> RankRow:
    return RankRow(
        run=rank.run,
        launch=rank.launch,
        rank=rank.rank,
        world_size=rank.world_size,
        pid=rank.pid,
        state=rank.state,
        is_live=is_live(rank),
        gpu=gpu.index,
        uuid=gpu.uuid or None,
        gpu_name=gpu.name,
        total_bytes=gpu.total_bytes,
        allocated_bytes=rank.allocated_bytes,
        reserved_bytes=rank.reserved_bytes,
        headroom_bytes=rank.headroom_flush_bytes,
        fragmentation_ratio=rank.fragmentation_ratio,
        verdict=tuple(why.text for why in rank.why),
    )
