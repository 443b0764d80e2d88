"""Counts the bytecodes that a call executes: the same on a busy and on an idle machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

ALLOWED_GROWTH = 1.1
"""A count may be higher by a tenth, before a test fails."""


def bytecodes(call: Callable[[], object]) -> int:
    """Return the bytecodes that a second call executes in this thread, in all Python functions.

    Python 3.12 counts none in functions that it traces for the first time.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
        count = 0
        call()
    finally:
        sys.settrace(previous)
    return count


def allowed(counts: dict[tuple[int, int], int]) -> int | None:
    """Return the highest count allowed on this Python; None if it is not among `counts`."""
    count = counts.get(sys.version_info[:2])
    return None if count is None else int(count * ALLOWED_GROWTH)
