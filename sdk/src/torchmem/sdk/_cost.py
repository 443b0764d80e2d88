"""What the SDK itself costs: CPU seconds over all threads in which its code runs.

How often something may be read: no faster than its interval, no dearer than its budget.
"""

from __future__ import annotations

import random
import threading


class CpuMeter:
    """A sum of CPU seconds, as differences of `time.thread_time`, safe against threads and signal handlers."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = (
            threading.RLock()
        )  # a signal handler may come back into the thread that holds it

    def add(self, seconds: float) -> None:
        """Count what one thread has spent."""
        with self._lock:
            self.seconds += seconds


# A read that took this long was waiting for the allocator's lock, while it held the GIL.
SLOW_READ_SECONDS = 0.005
BACK_OFF_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 600.0
# How much less often routine work may come where it is dear: never so late that a scrape would see it.
LONGEST_STRETCH = 5.0
LONGEST_STRETCH_SECONDS = 10.0


def affordable(interval: float, spent: float, budget: float) -> float:
    """Seconds until routine work that took `spent` seconds comes again: `interval`, or longer to keep the budget.

    At most five times as long, and at most 10 s; `budget` is a share of wall time.
    """
    longest = max(interval, min(LONGEST_STRETCH * interval, LONGEST_STRETCH_SECONDS))
    return min(max(interval, spent / budget), longest)


class Cadence:
    """Says when the next read is due; moments are random so that they do not lock onto a phase of the step."""

    def __init__(self, interval: float, budget: float, chance: random.Random | None = None) -> None:
        """`interval`: shortest mean pause in seconds; `budget`: share of wall time that reads may take."""
        self.interval = interval
        self.budget = budget
        self._chance = chance or random.Random()  # noqa: S311 - jitter, not a secret
        self._due = 0.0

    def is_due(self, now: float) -> bool:
        """Whether a read may start at `now` (monotonic seconds)."""
        return now >= self._due

    def spent(self, now: float, duration: float) -> None:
        """A read ended at `now` after `duration` seconds: set the next moment."""
        pause = max(self.interval, duration / self.budget)
        if duration > SLOW_READ_SECONDS:
            pause = max(pause, BACK_OFF_SECONDS)
        self._due = now + min(pause, LONGEST_PAUSE_SECONDS) * self._chance.uniform(0.5, 1.5)
