"""How many new series one user may create in an hour.

Prometheus keeps every series in memory for two to three hours after its last value, so names that
change at each scrape cost it far more than one page shows. A series that stays on the page, or
comes back within the hour, is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from torchmem.exporter.budgets import MAX_SERIES_PER_USER, NODE_SHARES, PageShare

WINDOW_SECONDS = 3600.0
MAX_HOURLY_SERIES_PER_USER = 2 * MAX_SERIES_PER_USER
"""62 starts of eight ranks with one GPU each."""
MAX_HOURLY_SERIES = NODE_SHARES * MAX_HOURLY_SERIES_PER_USER
"""Of all users together. Beyond it, each user with a live process still gets an equal part of it.

Users without one do not: one user may have thousands of user IDs (subuid(5)), but not as many
processes.
"""
MAX_USERS = 512  # who are remembered; those with nothing on the page are forgotten first
MAX_REFUSALS = 8  # of one user at one scan; further new processes are refused unread


@dataclass(slots=True)
class _User:
    """The series of one user since `start`, in Unix seconds; `shown` are those of processes."""

    start: float
    known: set[int] = field(default_factory=set)
    shown: dict[Hashable, PageShare] = field(default_factory=dict)
    next_shown: dict[Hashable, PageShare] = field(default_factory=dict)
    refusals: int = 0


class Churn:
    """Counts the series of each user, and refuses processes with too many new ones."""

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}
        self._total = 0
        self._forgotten = Counter[float]()

    def admit(
        self,
        user: str,
        process: Hashable,
        read: Callable[[], PageShare],
        now: float,
        *,
        is_live: bool = False,
    ) -> PageShare | None:
        """Return the share of a process that may be exported at `now`, else None.

        `now` is in Unix seconds. `process` stands for its series: while it is equal, `read`, which
        returns its share, is not called again. `is_live`: whether it is known to be alive.
        """
        record = self._record(user, now)
        if record is None:
            return None
        share = record.shown.get(process) or self._add(record, read, is_live=is_live)
        if share is not None:
            record.next_shown[process] = share
        return share

    def _record(self, user: str, now: float) -> _User | None:
        record = self._users.get(user)
        if record is None and len(self._users) >= MAX_USERS:
            self._forget_one()
        if record is None and len(self._users) < MAX_USERS:
            record = self._users[user] = _User(now)
        return record

    def _forget_one(self) -> None:
        """Forget the first user who has nothing on the page."""
        for user, record in self._users.items():
            if not record.shown and not record.next_shown:
                del self._users[user]
                self._forgotten[record.start] += len(record.known)
                self._total -= len(record.known)
                return

    def _add(
        self, record: _User, read: Callable[[], PageShare], *, is_live: bool
    ) -> PageShare | None:
        """Return a process's share if the budget suffices for its series."""
        left = self._left(record, is_live=is_live)
        if left <= 0 or record.refusals >= MAX_REFUSALS:
            return None
        share = read()
        new = set(share.series) - record.known
        if len(new) > left:
            record.refusals += 1
            return None
        record.known |= new
        self._total += len(new)
        return share

    def _left(self, record: _User, *, is_live: bool) -> int:
        used = len(record.known)
        left = MAX_HOURLY_SERIES - self._total - self._forgotten.total()
        if is_live:
            part = MAX_HOURLY_SERIES // len(self._users) - used
            left = max(left, min(part, 2 * MAX_HOURLY_SERIES - self._total))
        return min(MAX_HOURLY_SERIES_PER_USER - used, left)

    def end_scan(self, now: float) -> None:
        """Begin a new hour for users whose hour is over."""
        for start in list(self._forgotten):
            if not 0 <= now - start < WINDOW_SECONDS:
                del self._forgotten[start]
        for user, record in list(self._users.items()):
            record.shown, record.next_shown = record.next_shown, {}
            record.refusals = 0
            if not 0 <= now - record.start < WINDOW_SECONDS:
                record.start, record.known = now, _all(record.shown.values())
                if not record.shown:
                    del self._users[user]
        self._total = sum(len(record.known) for record in self._users.values())


def _all(shown: Iterable[PageShare]) -> set[int]:
    return {series for share in shown for series in share.series}
