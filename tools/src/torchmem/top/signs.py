"""Characters for terminals that have only ASCII, such as the Linux console with its own font."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

_SIGNS = str.maketrans(
    "▶…–−─•→↑↓▏·×°░█▌▐■▁▂▃▄▅▆▇",
    ">~---*>^v|-x'.####_.-:=+*",
)


def only_ascii(console: Console, environment: Mapping[str, str]) -> bool:
    """Return whether the terminal lacks the characters that the screen has."""
    return console.options.ascii_only or environment.get("TERM") == "linux"


def in_ascii(text: Text) -> Text:
    """Return the text with other signs, each as wide as before."""
    plain = text.copy()
    plain.plain = text.plain.translate(_SIGNS)
    return plain
