"""The ranks of a node in rows, from the run directory or from an exporter."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torchmem.allocator.sizes import format_index, format_size
from torchmem.capture.processes import TrainingProcess, training_processes
from torchmem.cli.gpus import gpu_indices
from torchmem.cli.terminal import aligned, joined
from torchmem.explain.rank_report import ending
from torchmem.explain.threats import threats
from torchmem.explain.thresholds import Limits
from torchmem.host.process_table import ProcessStatus, process_state
from torchmem.mcp.answer import ToolAnswer
from torchmem.report.command import chosen_thresholds, load
from torchmem.sample.errors import UsageError
from torchmem.sample.sample import LIVE_STATES, DeviceSample, Sample, State
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


def of_run_directory(directory: Path) -> Iterator[RankRow]:
    """Yield the ranks of this user; of root, those of all users. Raise UsageError."""
    gpus, thresholds, now = gpu_indices(), chosen_thresholds(None), time.time()
    for process in training_processes(directory):
        with suppress(UsageError):
            sample = load(process)
            limits = thresholds.limits(sample.process.run, platform.node())
            for device in sample.devices:
                yield _local(process, sample, device, now, gpus, limits)


def _local(  # noqa: PLR0913, PLR0917 - what a row is made of
    process: TrainingProcess,
    sample: Sample,
    device: DeviceSample,
    now: float,
    gpus: Mapping[str, int],
    limits: Limits,
) -> RankRow:
    allocator, layout = device.allocator, device.layout
    status = ProcessStatus(process.alive, process.pid)
    state = process_state(sample, status, now, now - sample.timestamp)
    return RankRow(
        run=sample.process.run,
        launch=process.process.launch,
        rank=sample.process.rank,
        world_size=sample.process.world_size,
        pid=process.pid,
        state=state,
        is_live=state in LIVE_STATES,
        gpu=gpus.get(device.uuid or ""),
        uuid=device.uuid,
        gpu_name=device.name,
        total_bytes=device.total_bytes,
        allocated_bytes=allocator.allocated_bytes.total if allocator else None,
        reserved_bytes=allocator.reserved_bytes.total if allocator else None,
        headroom_bytes=layout.headroom_flush_bytes if layout else None,
        fragmentation_ratio=layout.fragmentation_ratio if layout else None,
        verdict=_verdict(sample, device, state, limits),
    )


def _verdict(sample: Sample, device: DeviceSample, state: State, limits: Limits) -> tuple[str, ...]:
    ended = ending(sample, state)
    return (ended,) if ended else tuple(each.text for each in threats(sample, device, limits))


def of_node(node: Node) -> Iterator[RankRow]:
    """Yield the ranks that an exporter knows."""
    yield from (_remote(gpu, rank) for gpu in node.gpus for rank in gpu.ranks)
    yield from (_remote(Gpu(), rank) for rank in node.waiting)


def _remote(gpu: Gpu, rank: Rank) -> RankRow:
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
