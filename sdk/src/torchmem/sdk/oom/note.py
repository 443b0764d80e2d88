"""Adds to the exception that ends a process or a thread why memory ran out.

A note of an exception is part of its traceback wherever that is written: on a terminal, in a log,
by an error tracker. Python 3.10 has no notes; there the lines follow the traceback on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

PREFIX = "torchmem: "


class TracebackNote:
    """What the traceback of an OOM says about it.

    `lines` returns its lines; none if nothing is known, or nothing is wanted.
    """

    def __init__(
        self,
        lines: Callable[[], Sequence[str]] = tuple,
        *,
        has_notes: bool = sys.version_info >= (3, 11),
    ) -> None:
        self._lines = lines
        self._has_notes = has_notes
        self._unwritten = ""

    def add_to(self, error: BaseException) -> bool:
        """Add the note to an exception, unless it has it; return whether it has it now."""
        if any(str(note).startswith(PREFIX) for note in getattr(error, "__notes__", ())):
            return True
        text = self._text()
        if self._has_notes and text:
            error.add_note(text)  # type: ignore[attr-defined]
        else:
            self._unwritten = text
        return bool(text)

    def write_below(self) -> None:
        """Write on stderr what was added last, if the exception could not take it.

        Raises OSError.
        """
        text, self._unwritten = self._unwritten, ""
        _write(text)

    def write(self) -> bool:
        """Write the note on stderr; return whether there is one. Raises OSError."""
        text = self._text()
        _write(text)
        return bool(text)

    def _text(self) -> str:
        return "\n".join(f"{PREFIX}{line}" for line in self._lines())


def _write(text: str) -> None:
    if text and sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)
