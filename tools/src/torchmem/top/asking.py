"""Ask the exporter again and again in a thread of its own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torchmem.cli.exporter import AwayError, SilentError
from torchmem.node.state import NodeState, RankWhy
from torchmem.top.source import ScreenSource
from torchmem.top.view import RankKey


@dataclass(frozen=True, slots=True, eq=False)
class Newest:
    """The newest answers.

    Attributes:
        answers: those about single ranks.
        away: why the exporter has not answered since `since` (monotonic).
        is_silent: whether nothing answers at all.
        seen: when it last answered, in Unix seconds; None if it never has.
    """

    node: NodeState | None = None
    answers: Mapping[RankKey, RankWhy] = field(default_factory=dict)
    away: str | None = None
    since: float = math.inf
    is_silent: bool = False
    seen: float | None = None


class Asking:
    """Asks in a daemon thread, so that keys work while the exporter does not."""

    def __init__(self, source: ScreenSource, interval: float) -> None:
        self._source, self._interval = source, interval
        self._wanted: RankKey | None = None
        self._wake, self._is_closed = threading.Event(), False
        self.newest = Newest()
        threading.Thread(target=self._run, name="torchmem-top", daemon=True).start()

    def want(self, rank: RankKey | None) -> None:
        """Ask about this rank too, the first time at once."""
        if rank != self._wanted:
            self._wanted = rank
            self._wake.set()

    def close(self) -> None:
        """Ask no more."""
        self._is_closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._is_closed:
            # Before the question, so that a rank that is wanted meanwhile is asked about at once.
            self._wake.clear()
            self.newest = asked(self._source, self.newest, self._wanted)
            self._wake.wait(self._interval)


def asked(
    source: ScreenSource, before: Newest, rank: RankKey | None, now: Callable[[], float] = time.time
) -> Newest:
    """Return the answers of the source, after those of `before`."""
    try:
        node = source.node()
    except AwayError as error:
        since = min(before.since, time.monotonic())
        is_silent = isinstance(error, SilentError)
        return replace(before, away=str(error), since=since, is_silent=is_silent)
    answer = source.why(rank) if rank else None
    kept = before.answers.get(rank) if rank else None
    known = answer or kept
    return Newest(node, {rank: known} if rank and known else {}, seen=now())
