"""The ranks of a node in rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchmem.allocator.sizes import format_index, format_size
from torchmem.node.state import GpuState, NodeState, RankState
from torchmem.output.terminal import aligned, joined
from torchmem.top.view import is_live
from torchmem.why.answer import NodeAnswer

HEADER = (
    *("run", "launch", "rank", "pid", "GPU", "state"),
    *("allocated", "reserved", "headroom", "fragmentation index"),
)
NO_RANKS = "No ranks: start one with `torchmem run -- python train.py`."


Row = tuple[GpuState, RankState]
"""A rank on one GPU; on an unknown one, if it has used none yet."""


def answer(node: NodeState, source: str, run: str | None) -> NodeAnswer:
    """Return the ranks of a run, or of all, those that have ended last."""
    found = [(gpu, rank) for gpu in node.gpus for rank in gpu.ranks]
    found += [(GpuState(), rank) for rank in node.waiting]
    chosen = sorted((row for row in found if run in {None, row[1].run}), key=_place)
    threatened = [f"  {_who(*row)}: {row[1].why[0].text}" for row in chosen if row[1].why]
    table = list(aligned([HEADER, *(_cells(*row) for row in chosen)])) if chosen else [NO_RANKS]
    sections = [[f"Ranks of {source}"], table, threatened and ["Verdicts", *threatened]]
    data = {"source": source, "ranks": [_data(*row) for row in chosen]}
    return NodeAnswer(joined(sections), data, "Pass `run`.")


def _place(row: Row) -> tuple[bool, str, str, int, int]:
    gpu, rank = row
    return not is_live(rank), rank.run, rank.launch or "", rank.rank or 0, gpu.index or 0


def _who(gpu: GpuState, rank: RankState) -> str:
    return f"rank {_text(rank.rank)} of run {rank.run}, GPU {_text(gpu.index)}"


def _cells(gpu: GpuState, rank: RankState) -> Sequence[str]:
    ratio = rank.fragmentation_ratio
    return (
        rank.run,
        rank.launch or "-",
        _text(rank.rank),
        _text(rank.pid),
        _text(gpu.index),
        rank.state,
        _size(rank.allocated_bytes),
        _size(rank.reserved_bytes),
        _size(rank.headroom_flush_bytes),
        "-" if ratio is None else format_index(ratio),
    )


def _data(gpu: GpuState, rank: RankState) -> dict[str, Any]:
    """Return a row for JSON; `headroom_bytes` is that with a flush of the cache."""
    return {
        "run": rank.run,
        "launch": rank.launch,
        "rank": rank.rank,
        "world_size": rank.world_size,
        "pid": rank.pid,
        "state": rank.state,
        "is_live": is_live(rank),
        "gpu": gpu.index,
        "uuid": gpu.uuid or None,
        "gpu_name": gpu.name,
        "total_bytes": gpu.total_bytes,
        "allocated_bytes": rank.allocated_bytes,
        "reserved_bytes": rank.reserved_bytes,
        "headroom_bytes": rank.headroom_flush_bytes,
        "fragmentation_ratio": rank.fragmentation_ratio,
        "verdict": [why.text for why in rank.why],
    }


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)


def _size(size: int | None) -> str:
    return "-" if size is None else format_size(size)
