"""What one tier of releases has done on one device, and whether it pays."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_low

from torchmem.sample.release_tiers import TIERS, ReleaseTier
from torchmem.sample.sample import Releases

# A release has paid when its memory stays released for this many windows.
PAYBACK_WINDOWS = 3
# A tier is given up after this many releases in a row that have not paid.
MAX_UNPAID = 3
# The median of this many windows is what a job takes from the driver without a release.
USUAL_WINDOWS = 5


@dataclass(slots=True)
class _Debt:
    """A release that has not paid yet, and what was taken from the driver since, in bytes."""

    released: int
    usual: int
    taken: int = 0
    windows: int = 0


class Stopwatch:
    """Measures the releases of one tier; another thread may read `seconds` while one lasts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        # Sum, start, and part of the time, in one tuple: a reader never sees half of a change.
        self._state: tuple[float, float | None, float] = (0.0, None, 1.0)

    @property
    def seconds(self) -> float:
        """The time so far."""
        total, started, part = self._state
        return total if started is None else total + part * (self._clock() - started)

    def start(self, part: float = 1.0) -> None:
        """Begin to measure; this part of the time counts."""
        self._state = (self.seconds, self._clock(), part)

    def stop(self) -> None:
        """Stop if it was started."""
        self._state = (self.seconds, None, 1.0)


class ReleaseAccount:
    """The releases of one tier on one device.

    A window lasts from one read of the statistics to the next. A release does not pay if, within
    `PAYBACK_WINDOWS`, at least half of its bytes are taken from the driver again, beyond what the
    job usually took in a window.
    """

    def __init__(self, tier: ReleaseTier) -> None:
        self.times = 0
        self.released_bytes = 0
        self.stopwatch = Stopwatch()
        self.given_up = False
        self._seconds = 0.0
        # The others respond to a need, so they pay.
        self._is_judged = TIERS[tier].share is not None
        self._unpaid = 0
        self._debt: _Debt | None = None
        self._taken: deque[int] = deque(maxlen=USUAL_WINDOWS)

    def add(self, returned: int) -> None:
        """Count a release that returned these bytes to the driver; 0 bytes are not counted."""
        if returned <= 0:
            return
        self.times += 1
        self.released_bytes += returned
        debt = self._debt or _Debt(0, median_low(self._taken) if self._taken else 0)
        self._debt = _Debt(debt.released + returned, debt.usual, debt.taken)

    def end_window(self, taken: int) -> None:
        """End a window in which the allocator took these bytes from the driver."""
        debt = self._debt
        if debt is None:
            self._taken.append(taken)
            return
        debt.taken += max(0, taken - debt.usual)
        debt.windows += 1
        if 2 * debt.taken >= debt.released:
            self._settle(paid=False)
        elif debt.windows >= PAYBACK_WINDOWS:
            self._settle(paid=True)

    def _settle(self, *, paid: bool) -> None:
        self._debt = None
        self._unpaid = 0 if paid else self._unpaid + 1
        self.given_up = self._is_judged and (self.given_up or self._unpaid >= MAX_UNPAID)

    def published(self) -> Releases:
        """Return the account as it is published."""
        # Not less than before, if the release ended between the two reads of the stopwatch.
        self._seconds = max(self._seconds, self.stopwatch.seconds)
        return Releases(self.times, self.released_bytes, self._seconds, self.given_up)


@contextmanager
def timed(accounts: Collection[ReleaseAccount]) -> Iterator[None]:
    """Measure a release, and divide its time equally among the accounts of the devices."""
    for account in accounts:
        account.stopwatch.start(1 / len(accounts))
    try:
        yield
    finally:
        for account in accounts:
            account.stopwatch.stop()
