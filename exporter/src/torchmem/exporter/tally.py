"""The count of events of one GPU, such that Prometheus sees every counter at 0 before it sees it at 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchmem.sample.xids import XIDS

XID = "xid"
MOST_XIDS = 256
UNEXPECTED_XID_HOLD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts by XID and by event, and when each XID came last (Unix seconds)."""

    xids: Mapping[int, int]
    xid_times: Mapping[int, float]
    events: Mapping[str, int]


class Count:
    """Events of one GPU; what it is told to expect stands at 0 from the start."""

    def __init__(self) -> None:
        self._expected_xids: frozenset[int] = frozenset()
        self._xids = Counter[int]()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._events = Counter[str]()
        self._was_shown = False

    def expect(self, kinds: Iterable[str]) -> None:
        """These kinds of events are being watched."""
        for kind in kinds:
            if kind == XID:
                self._expected_xids = frozenset(XIDS)
            else:
                self._events[kind] += 0

    def add(self, name: str, xid: int | None, now: float) -> None:
        """One event at `now` (Unix seconds)."""
        if xid is None:
            self._events[name] += 1
        elif xid in self._xids or len(self._xids) < MOST_XIDS:
            self._xids[xid] += 1
            self._first.setdefault(xid, now)
            self._last[xid] = now

    def tally(self, now: float) -> Tally:
        """The counts as they are shown at `now`.

        Everything is shown as 0 once, and a code that was not expected for a minute, so that a rate of the counter does
        not miss its first event; the timestamp is there at once.
        """
        xids = {xid: self._xids[xid] for xid in sorted(self._expected_xids | set(self._xids))}
        shown = {xid: 0 if self._is_held(xid, now) else count for xid, count in xids.items()}
        events = {
            name: count if self._was_shown else 0 for name, count in sorted(self._events.items())
        }
        self._was_shown = True
        return Tally(shown, dict(self._last), events)

    def _is_held(self, xid: int, now: float) -> bool:
        young = now - self._first.get(xid, now) < UNEXPECTED_XID_HOLD_SECONDS
        return not self._was_shown or (young and xid not in self._expected_xids)
