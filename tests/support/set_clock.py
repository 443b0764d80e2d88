"""A clock that a test sets."""

from __future__ import annotations


class SetClock:
    """Seconds in `now`, which the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now
