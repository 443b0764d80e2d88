"""What a tier of the setting `release` did, and whether it pays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median_low

from torchmem.sample.sample import Releases

# A release has paid when its memory stays released for this many windows.
PAYBACK_WINDOWS = 3
# A tier is given up after this many releases in a row that have not paid.
MAX_UNPAID = 3
# What a job takes from the driver without a release is the median of this many windows.
USUAL_WINDOWS = 5


@dataclass(slots=True)
class _Debt:
    """A release that has not paid yet, and what was taken from the driver since, in bytes."""

    released: int
    usual: int
    taken: int = 0
    windows: int = 0


class ReleaseAccount:
    """The releases of one tier on one device.

    A window lasts from one read of the statistics to the next. A release does not pay if, within
    `PAYBACK_WINDOWS`, at least half of its bytes are taken from the driver again, beyond what the
    job usually took in a window.
    """

    def __init__(self, *, is_timed: bool = True) -> None:
        """`is_timed` is False for a tier whose time is not known."""
        self.times = 0
        self.released_bytes = 0
        self.seconds: float | None = 0.0 if is_timed else None
        self.given_up = False
        self._unpaid = 0
        self._debt: _Debt | None = None
        self._taken: deque[int] = deque(maxlen=USUAL_WINDOWS)

    def add(self, returned: int, seconds: float = 0.0, taken: int = 0) -> None:
        """Count a release that returned these bytes to the driver; nothing counts as none.

        `taken` are bytes that the job took from the driver in the same window, and that caused the
        release.
        """
        if self.seconds is not None:
            self.seconds += seconds
        if returned <= 0:
            return
        self.times += 1
        self.released_bytes += returned
        debt = self._debt or _Debt(0, median_low(self._taken) if self._taken else 0)
        self._debt = _Debt(debt.released + returned, max(debt.usual, taken), debt.taken)

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
        self.given_up = self.given_up or self._unpaid >= MAX_UNPAID

    def published(self) -> Releases:
        """Return the account as it is published."""
        return Releases(self.times, self.released_bytes, self.seconds, self.given_up)
