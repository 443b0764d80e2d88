"""Writing to stdout, whatever characters it can show."""

from __future__ import annotations

import io
import sys


def write_out(words: str) -> None:
    """Write, with a mark for a character that the terminal lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(words)
    sys.stdout.flush()
