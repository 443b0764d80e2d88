"""The last ten minutes of each GPU and rank, kept by the exporter.

A point is everything that one state document says, so two values at one time never come from two
readings. All series together take at most MAX_SERIES times 6 KB, however many ranks there are.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchmem.explain.parts import GROUPS, group_bytes
from torchmem.node.state import GpuState, NodeState, RankState
from torchmem.sample.sample import LIVE_STATES

SECONDS = 600.0
SPACING_SECONDS = 5.0
"""The least time between two points, except for the newest one."""
MAX_POINTS = int(SECONDS / SPACING_SECONDS) + 2
MAX_SERIES = 1024
MAX_GPUS = 64
MAX_RANKS_PER_USER = 256

RANK_COLUMNS = ("tensor_bytes", "reserved_bytes", "headroom_flush_bytes", "fragmentation_ratio")
"""What the history of a rank has, as fields of RankState."""
GPU_COLUMNS = tuple(group.name for group in GROUPS)


@dataclass(frozen=True, slots=True)
class HistoryColumns:
    """Values over time: Unix seconds, and one list for each name; None where unknown."""

    times: Sequence[float]
    values: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class GpuHistories:
    """The bytes of each group of parts, by the UUID of the GPU. `seconds`: how far they go back."""

    seconds: float
    gpus: Mapping[str, HistoryColumns]


class HistorySeries:
    """Points in order of time; the oldest go when the newest one is SECONDS later."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._times = array("d")
        self._columns = tuple(array("d") for _ in names)

    def add(self, time: float, values: Iterable[float | None]) -> None:
        """Add a point, in place of the newest one if that is close to the one before it."""
        times = self._times
        # A rank that has not published since is the same point; a clock may be set back, too.
        if times and time <= times[-1]:
            return
        if len(times) > 1 and times[-1] - times[-2] < SPACING_SECONDS:
            self._delete(slice(-1, None))
        times.append(time)
        for column, value in zip(self._columns, values, strict=True):
            column.append(math.nan if value is None else value)
        old = sum(1 for at in times if at < time - SECONDS)
        self._delete(slice(0, max(old, len(times) - MAX_POINTS)))

    def _delete(self, which: slice) -> None:
        for column in (self._times, *self._columns):
            del column[which]

    @property
    def columns(self) -> HistoryColumns:
        """The points."""
        values = {
            name: [None if math.isnan(value) else value for value in column]
            for name, column in zip(self._names, self._columns, strict=True)
        }
        return HistoryColumns(times=[round(time, 1) for time in self._times], values=values)


class NodeHistory:
    """The series of a node. Safe to call from several threads."""

    def __init__(self) -> None:
        self._gpus: dict[str, HistorySeries] = {}
        self._ranks: dict[tuple[str, str], HistorySeries] = {}
        self._lock = threading.Lock()

    def add(self, state: NodeState) -> None:
        """Add a state; forget the GPUs and ranks that it no longer has.

        A rank's last point is what it published at its end.
        """
        gpus = {gpu.uuid: gpu for gpu in state.gpus[:MAX_GPUS]}
        ranks = {(gpu.uuid, rank.id): rank for gpu in state.gpus for rank in gpu.ranks}
        with self._lock:
            self._gpus = {uuid: self._gpus.get(uuid) or HistorySeries(GPU_COLUMNS) for uuid in gpus}
            self._ranks = self._kept(ranks)
            for uuid, series in self._gpus.items():
                _add_gpu(series, state.time or 0.0, gpus[uuid])
            for key, series in self._ranks.items():
                series.add(ranks[key].sample_time or 0.0, _rank_values(ranks[key]))

    def _kept(
        self, ranks: dict[tuple[str, str], RankState]
    ) -> dict[tuple[str, str], HistorySeries]:
        """Return the series of these ranks. A new one needs room in the budgets."""
        kept = {key: series for key, series in self._ranks.items() if key in ranks}
        users = Counter(ranks[key].uid for key in kept)
        for key, rank in ranks.items():
            is_new = key not in kept and rank.state in LIVE_STATES
            has_room = len(kept) < MAX_SERIES - MAX_GPUS and users[rank.uid] < MAX_RANKS_PER_USER
            if is_new and has_room:
                kept[key] = HistorySeries(RANK_COLUMNS)
                users[rank.uid] += 1
        return kept

    def of_gpus(self) -> GpuHistories:
        """Return the history of every GPU."""
        with self._lock:
            found = {uuid: series.columns for uuid, series in self._gpus.items()}
        return GpuHistories(seconds=SECONDS, gpus=found)

    def of_rank(self, uuid: str, rank_id: str) -> HistoryColumns:
        """Return the history of a rank on a GPU, up to its end; it may be empty."""
        with self._lock:
            return self._ranks.get((uuid, rank_id), HistorySeries(RANK_COLUMNS)).columns


def _add_gpu(series: HistorySeries, time: float, gpu: GpuState) -> None:
    if gpu.parts:
        series.add(time, group_bytes(gpu.parts))


def _rank_values(rank: RankState) -> Iterator[float | None]:
    return (getattr(rank, name) for name in RANK_COLUMNS)
