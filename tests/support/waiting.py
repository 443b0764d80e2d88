"""Waiting for a condition, with a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


MAX_PAUSE = 0.2


def until(condition: Callable[[], T | None], seconds: float = 120.0, pause: float = 0.01) -> T:
    """Return the first true result of `condition`, asked after pauses that get longer.

    Raises AssertionError if there is none within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(pause)
        pause = max(pause, min(MAX_PAUSE, 1.1 * pause))
    raise AssertionError(f"the condition did not become true within {seconds} s")
