"""What the user has chosen to see: the help or a rank's report, the rank, the order, the filter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmem.node.state import GpuState, NodeState, RankState
from torchmem.sample.sample import LIVE_STATES

Order = Literal["rank", "headroom", "reserved"]
ORDERS: tuple[Order, ...] = ("rank", "headroom", "reserved")
MAX_FILTER = 60
PAGE_RANKS = 10
HELP_KEYS = frozenset({"?", "h", "f1"})
BACK_KEYS = frozenset({"escape", "backspace"})
WAITING = GpuState(uuid="waiting")
"""Stands for the GPU of ranks that have not used one yet."""

RankKey = tuple[str, str]
"""A GPU's UUID and a rank's id."""


@dataclass(frozen=True, slots=True)
class GpuRanks:
    """A GPU and those of its ranks that are shown, in order."""

    gpu: GpuState
    ranks: Sequence[RankState]


@dataclass(frozen=True, slots=True)
class View:
    """The choices.

    `selected` None: the first rank that is out of memory, else the first one. `is_typing`: the keys
    go into the filter. `is_open`: the report of the selected rank fills the screen; `is_help`: the
    help does. Both start at line `scroll`.
    """

    selected: RankKey | None = None
    order: Order = "rank"
    filter: str = ""
    is_typing: bool = False
    is_open: bool = False
    is_help: bool = False
    scroll: int = 0

    def groups(self, node: NodeState) -> list[GpuRanks]:
        """Return the GPUs and ranks to show, in order."""
        waiting = [(WAITING, node.waiting)] if node.waiting else []
        found = [
            GpuRanks(gpu, sorted(filter(self._matches, ranks), key=_RANK_KEYS[self.order]))
            for gpu, ranks in [*((gpu, gpu.ranks) for gpu in node.gpus), *waiting]
        ]
        shown = [group for group in found if group.ranks or not self.filter]
        if self.order == "rank":
            return shown
        key = _RANK_KEYS[self.order]
        first = [(not g.ranks, *(key(g.ranks[0]) if g.ranks else (0, 0))) for g in shown]
        return [shown[at] for at in sorted(range(len(shown)), key=lambda at: first[at])]

    def position(self, groups: Sequence[GpuRanks]) -> int:
        """Return the position of the selected rank among all shown; 0 if it is gone."""
        known = keys(groups)
        if self.selected is not None:
            return known.index(self.selected) if self.selected in known else 0
        states = [rank.state for group in groups for rank in group.ranks]
        return states.index("oom") if "oom" in states else 0

    def _matches(self, rank: RankState) -> bool:
        wanted = self.filter.casefold()
        is_launch = "-" in wanted and (rank.launch or "").startswith(wanted)
        return is_launch or wanted in rank.run.casefold()


def is_live(rank: RankState) -> bool:
    """Return whether the process still runs."""
    return rank.state in LIVE_STATES


def out_of_memory(node: NodeState) -> list[RankKey]:
    """Return the keys of the ranks that died of an OutOfMemoryError."""
    ranks = ((gpu.uuid, rank) for gpu in node.gpus for rank in gpu.ranks)
    return [(uuid, rank.id) for uuid, rank in ranks if rank.state == "oom"]


def keys(groups: Iterable[GpuRanks]) -> list[RankKey]:
    """Return the keys of all ranks of the groups."""
    return [(group.gpu.uuid, rank.id) for group in groups for rank in group.ranks]


def press(view: View, key: str, groups: Sequence[GpuRanks], last_line: int = 0) -> View | None:
    """Return the view after a key, None to end.

    `groups` are those on the screen; `last_line` is the highest `scroll` of the help or report.
    """
    if view.is_typing:
        return _type(view, key)
    if key == "q":
        return None
    if key in HELP_KEYS:
        return replace(view, is_help=not view.is_help, scroll=0)
    if view.is_help or view.is_open:
        return _read(view, key, last_line)
    if key in _CHANGES:
        return _CHANGES[key](view)
    return _select(view, key, groups)


def _select(view: View, key: str, groups: Sequence[GpuRanks]) -> View:
    known = keys(groups)
    if not known or (key not in _MOVES and key != "enter"):
        return view
    at = view.position(groups)
    if key == "enter":
        return replace(view, selected=known[at], is_open=True, scroll=0)
    return replace(view, selected=known[max(0, min(len(known) - 1, _MOVES[key](at, len(known))))])


def _read(view: View, key: str, last_line: int) -> View:
    """Move within the help or the report, or go back."""
    if key in _MOVES:
        at = min(view.scroll, last_line)
        return replace(view, scroll=max(0, min(last_line, _MOVES[key](at, last_line))))
    if key not in BACK_KEYS:
        return view
    if view.is_help:
        return replace(view, is_help=False, scroll=0)
    return replace(view, is_open=False, scroll=0)


def _type(view: View, key: str) -> View:
    if key == "enter":
        return replace(view, is_typing=False)
    if key == "escape":
        return replace(view, is_typing=False, filter="")
    if key == "backspace":
        return replace(view, filter=view.filter[:-1])
    if len(key) == 1 and key.isprintable():
        return replace(view, filter=(view.filter + key)[:MAX_FILTER])
    return view


_CHANGES: dict[str, Callable[[View], View]] = {
    "s": lambda view: replace(view, order=ORDERS[(ORDERS.index(view.order) + 1) % len(ORDERS)]),
    "/": lambda view: replace(view, is_typing=True),
    "escape": lambda view: replace(view, filter=""),
}
_MOVES: dict[str, Callable[[int, int], int]] = {
    "up": lambda at, _: at - 1,
    "k": lambda at, _: at - 1,
    "down": lambda at, _: at + 1,
    "j": lambda at, _: at + 1,
    "page up": lambda at, _: at - PAGE_RANKS,
    "page down": lambda at, _: at + PAGE_RANKS,
    "home": lambda _, __: 0,
    "end": lambda _, count: count,
}
_RANK_KEYS: dict[Order, Callable[[RankState], tuple[float, float]]] = {
    "rank": lambda rank: (not is_live(rank), rank.rank or 0),
    "headroom": lambda rank: (rank.headroom_flush_bytes is None, rank.headroom_flush_bytes or 0),
    "reserved": lambda rank: (rank.reserved_bytes is None, -(rank.reserved_bytes or 0)),
}
