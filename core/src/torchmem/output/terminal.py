"""Text for terminals: tables, wrapped paragraphs, output, and a status line."""

from __future__ import annotations

import io
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_COLUMNS = 98
STATUS_DELAY_SECONDS = 1.0
STATUS_INTERVAL_SECONDS = 0.1
PLAIN_INTERVAL_SECONDS = 10.0
"""The time between lines of progress if stderr is not a terminal, and before the first one."""
WARM_UP_REPORTS = 2
"""Reports of progress that say nothing about the pace of the rest."""
BAR_COLUMNS = 30


@contextmanager
def interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Treat signals like Ctrl-C, so that what is in use is given back."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        yield "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()


def counted(number: int, noun: str, several: str | None = None) -> str:
    """Return "1 step" or "1,024 steps". several: the plural, if it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def first_of(names: Sequence[object], most: int) -> str:
    """Return the first names, and how many more there are: "a, b and 3 more"."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def joined(sections: Iterable[Sequence[str]]) -> str:
    """Return sections of lines as text, with an empty line between those that are not empty."""
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def wrapped(text: str, first: str = "", width: int | None = None) -> list[str]:
    """Return the lines of a paragraph, with `first` before the first and the others indented.

    Lines have at most `width` columns. Without it, they have MAX_COLUMNS, and longer words, such as
    settings to copy, are not broken.
    """
    return textwrap.wrap(
        text,
        width or MAX_COLUMNS,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
        break_long_words=width is not None,
    )


def write_out(text: str) -> None:
    """Write to stdout, with "?" in place of characters that its encoding lacks."""
    # Notebooks have a stream of their own, which cannot be reconfigured.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(text)
    sys.stdout.flush()


def bar(label: str, done: int, total: int) -> str:
    """Return a progress bar after `label`."""
    share = min(1.0, done / total) if total else 1.0
    return f"{label} [{'=' * round(BAR_COLUMNS * share):<{BAR_COLUMNS}}] {share:4.0%}"


class Pace:
    """How fast work advances, and how long the rest of it takes.

    Only the reports after the first WARM_UP_REPORTS count: the start of a script takes much longer
    than a step, and so do its first steps.
    """

    def __init__(self) -> None:
        self._reports = 0
        self._start = self._newest = 0.0, 0

    def add(self, now: float, done: int) -> None:
        """Take a report at the time `now`, in seconds; one that repeats the last is none."""
        if self._reports and done == self._newest[1]:
            return
        self._reports += 1
        self._newest = now, done
        if self._reports <= WARM_UP_REPORTS:
            self._start = self._newest

    def seconds_left(self, now: float, total: int) -> float | None:
        """Return the seconds that the rest takes at the pace so far; None if that is unknown."""
        (began, first), (at, done) = self._start, self._newest
        if done <= first or at <= began:
            return None
        return max(0.0, (total - done) * (at - began) / (done - first) - (now - at))


def share_done(label: str, done: int, total: int, seconds: float, left: float | None) -> str:
    """Return a line of progress without a bar: share, time so far, and what is left, if known."""
    share = min(1.0, done / total) if total else 1.0
    text = f"torchmem: {label}: {share:.0%} after {seconds:.0f} s"
    return text if left is None or share == 1 else f"{text}, about {left:.0f} s left"


class StatusLine:
    """A line that is redrawn in place and erased at the end; without a terminal, plain lines.

    The first line appears after STATUS_DELAY_SECONDS, later ones at most every
    STATUS_INTERVAL_SECONDS. Plain lines appear every PLAIN_INTERVAL_SECONDS. plain_seconds: for a
    terminal that something else writes to as well, the time between plain lines there.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        plain_seconds: float | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._started = clock()
        is_terminal = self._stream.isatty()
        self._is_redrawn = is_terminal and plain_seconds is None
        self._interval = PLAIN_INTERVAL_SECONDS
        if is_terminal:
            self._interval = plain_seconds or STATUS_INTERVAL_SECONDS
        delay = STATUS_DELAY_SECONDS if self._is_redrawn else self._interval
        self._next = self._started + delay
        self._drawn = ""
        self._pace = Pace()

    def show(self, label: Callable[[], str], done: int, total: int) -> None:
        """Show how much is done, if an update is due."""
        now = self._clock()
        self._pace.add(now, done)
        if now < self._next:
            return
        self._next = now + self._interval
        if self._is_redrawn:
            self._draw(bar(label(), done, total))
        else:
            left = self._pace.seconds_left(now, total)
            line = share_done(label(), done, total, now - self._started, left)
            self._stream.write(f"{line}\n")
            self._stream.flush()

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
