"""Lines of text for a terminal of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

WIDTH = 98


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
        text, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
