"""A line on stderr that says how far a long replay is; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Self

QUIET_SECONDS = 1.0
INTERVAL_SECONDS = 0.1
WIDTH = 30


class Progress:
    """Called with events done and in all; draws after a second, and wipes its line at the end."""

    def __init__(self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`label`: what is being replayed."""
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next = clock() + QUIET_SECONDS
        self._drawn = ""

    def __call__(self, done: int, total: int) -> None:
        """Draw, unless the replay is young, the last line is fresh, or nobody looks."""
        now = self._clock()
        if now < self._next or not self._stream.isatty():
            return
        self._next = now + INTERVAL_SECONDS
        share = min(1.0, done / total) if total else 1.0
        bar = "=" * round(WIDTH * share)
        self._draw(f"{self._label[:30]} [{bar:<{WIDTH}}] {share:4.0%}")

    def _draw(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(len(self._drawn)))
        self._stream.flush()
        self._drawn = line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._drawn:
            self._draw("")
            self._stream.write("\r")
            self._stream.flush()
