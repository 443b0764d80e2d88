"""A line on stderr that says how far a long replay is; nothing where stderr is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from torchmem.cli.status_line import StatusLine, bar


class Progress(StatusLine):
    """Called with events done and in all."""

    def __init__(self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`label`: what is being replayed."""
        super().__init__(stream, clock)
        self._label = label[:30]

    def __call__(self, done: int, total: int) -> None:
        """Draw, unless the replay is young, the last line is fresh, or nobody looks."""
        self.show(lambda: bar(self._label, done, total))
