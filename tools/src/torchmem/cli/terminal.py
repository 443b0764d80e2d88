"""Lines of text for a terminal of 100 columns.

Writing to stdout, whatever characters it can show.

A line on a terminal that is drawn over again and wiped at the end; nothing where the stream is no terminal.
"""

from __future__ import annotations

import io
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_COLUMNS = 98


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of cells as a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()


def wrapped(text: str, first: str = "") -> list[str]:
    """A paragraph; `first` stands before its first line and the others are indented by as much."""
    indent = " " * len(first)
    return textwrap.wrap(
        text,
        MAX_COLUMNS,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def write_out(words: str) -> None:
    """Write, with a mark for a character that the terminal lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(words)
    sys.stdout.flush()


QUIET_SECONDS = 1.0
INTERVAL_SECONDS = 0.1
BAR_COLUMNS = 30


class StatusLine:
    """Draws after a second and then at intervals."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next = clock() + QUIET_SECONDS
        self._drawn = ""

    def show(self, line: Callable[[], str]) -> None:
        """Draw, unless the work is young, the last line is fresh, or nobody looks."""
        now = self._clock()
        if now >= self._next and self._stream.isatty():
            self._next = now + INTERVAL_SECONDS
            self._draw(line())

    def _draw(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(len(self._drawn)))
        self._stream.flush()
        self._drawn = line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._drawn:
            self._draw("")
            self._stream.write("\r")
            self._stream.flush()


def bar(label: str, done: int, total: int) -> str:
    """`label` and how much is done."""
    share = min(1.0, done / total) if total else 1.0
    return f"{label} [{'=' * round(BAR_COLUMNS * share):<{BAR_COLUMNS}}] {share:4.0%}"
