"""What `torchmem top` has seen of each rank since it was started."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torchmem.node.state import NodeState
from torchmem.top.view import RankKey

SECONDS = 600.0
MIN_PAUSE_SECONDS = 1.0
MAX_POINTS = int(SECONDS / MIN_PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class SeenPoint:
    """A rank's bytes at a time in Unix seconds; None if unknown."""

    time: float
    reserved_bytes: int | None
    headroom_bytes: int | None


class SeenHistory:
    """The last SECONDS of the ranks of a node."""

    def __init__(self) -> None:
        self._points: dict[RankKey, deque[SeenPoint]] = {}

    def add(self, node: NodeState) -> None:
        """Remember the values of all ranks, and forget ranks that are gone."""
        if node.time is None:
            return
        ranks = {(gpu.uuid, rank.id): rank for gpu in node.gpus for rank in gpu.ranks}
        self._points = {key: self._points.get(key, deque(maxlen=MAX_POINTS)) for key in ranks}
        for key, rank in ranks.items():
            points = self._points[key]
            if not points or node.time >= points[-1].time + MIN_PAUSE_SECONDS:
                points.append(SeenPoint(node.time, rank.reserved_bytes, rank.headroom_flush_bytes))
            while points[0].time < node.time - SECONDS:
                points.popleft()

    def of(self, key: RankKey) -> Sequence[SeenPoint]:
        """Return the points of a rank, the oldest first."""
        return self._points.get(key, ())
