"""Waiting for a condition, with a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T | None], seconds: float = 120.0, pause: float = 0.01) -> T:
    """Return the first true result of `condition`.

    Raises AssertionError if there is none within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(pause)
    raise AssertionError(f"the condition did not become true within {seconds} s")
