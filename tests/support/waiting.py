"""Waiting for something to happen, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T | None], seconds: float = 120.0, pause: float = 0.01) -> T:
    """The first true answer of `condition`; AssertionError when none comes in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(pause)
    raise AssertionError(f"nothing happened within {seconds} s")
