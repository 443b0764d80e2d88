"""What a picture shows, as text that differs only where the picture would look different.

Descriptions of panels, comments, formatting, and code that draws nothing are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LITERAL = re.compile(r"`[^`]*`|\"[^\"\n]*\"|'[^'\n]*'")
_UNSEEN = {"description", "id", "refId", "tooltip"}
"""Keys of a dashboard's JSON that change nothing on the screen."""


def first_screen(board: Json) -> str:
    """Return what a board shows before a row is opened: its head, its rows, and open panels."""
    rows = [{**panel, "panels": []} for panel in board["panels"]]
    shown = {key: board[key] for key in ("title", "time", "templating", "links", "annotations")}
    return json.dumps(_visible({**shown, "panels": rows}), sort_keys=True)


def _visible(value: object) -> object:
    if isinstance(value, dict):
        return {key: _visible(each) for key, each in value.items() if key not in _UNSEEN}
    return [_visible(each) for each in value] if isinstance(value, list) else value


def page(files: Iterable[Path]) -> str:
    """Return what a page in the browser shows: its markup, its styles, and texts of its scripts.

    Texts of one word in small letters are left out, for they are mostly names.
    """
    return "\n".join(text for file in sorted(files) for text in _texts(file))


def _texts(file: Path) -> Iterator[str]:
    source = _COMMENT.sub("", file.read_text())
    if file.suffix in {".css", ".html"}:
        yield " ".join(source.split())
    if file.suffix == ".js":
        code = re.sub(r"(^|\s)//.*", "", source)
        yield from (text for text in _LITERAL.findall(code) if re.search(r"[A-Z ]", text))
