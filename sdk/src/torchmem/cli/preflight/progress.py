"""How far a script is, on stderr where that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from torchmem.cli.status_line import StatusLine, bar
from torchmem.core.sizes import format_size
from torchmem.preflight.progress import Progress

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

LINE_SECONDS = 2.0


class Steps(StatusLine):
    """One line that is drawn over again, for a script whose output is kept away from the terminal."""

    def __init__(self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`label`: what is being tried."""
        super().__init__(stream, clock)
        self._label = label

    def __call__(self, progress: Progress) -> None:
        """Draw, unless the run is young, the last line is fresh, or nobody looks."""
        self.show(lambda: bar(f"{self._label}, {_memory(progress)}", progress.step, progress.steps_wanted))


class Lines:
    """Whole lines every now and then, between those of a script that writes to the same terminal."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next = clock() + LINE_SECONDS

    def __call__(self, progress: Progress) -> None:
        """Write a line, unless the last one is fresh, or nobody looks."""
        now = self._clock()
        if now >= self._next and self._stream.isatty():
            self._next = now + LINE_SECONDS
            step = f"step {progress.step:,} of {progress.steps_wanted:,}"
            self._stream.write(f"torchmem preflight (phantom): {step}, {_memory(progress)}\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing is left to wipe."""


def _memory(progress: Progress) -> str:
    return f"{format_size(progress.peak_reserved)} reserved so far"
