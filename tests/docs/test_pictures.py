"""No picture in the documentation is older than what it shows, and a stamp tells when one is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from docs.generate.pictures import shown
from docs.generate.pictures.docs import DOCS, SUBJECTS, stale

Json = dict[str, Any]


def test_no_picture_is_older_than_what_it_shows() -> None:
    """Each picture was drawn from what there is now; the command after its name draws it again.

    `make pictures ARGS='--same NAME'` is enough if you looked and it would not look different.
    """
    older = {
        path: f"make pictures ARGS={name}" for name, paths in stale().items() for path in paths
    }

    assert older == {}


def test_every_picture_is_drawn_by_a_command(root: Path) -> None:
    """Each picture that a page shows belongs to a subject, and each of a subject is on a page."""
    pages = [root / "README.md", *DOCS.glob("*.md")]
    on_pages = {
        str((page.parent / link).relative_to(DOCS))
        for page in pages
        for link in re.findall(r"!\[[^\]]*\]\(([^:)]+\.(?:png|webp))\)", page.read_text())
    }

    assert {path for subject in SUBJECTS.values() for path in subject.shows} == on_pages


BOARD: Json = {
    "title": "Fleet",
    "time": {},
    "templating": {},
    "links": [],
    "annotations": {},
    "panels": [
        {"title": "GPUs", "id": 1, "description": "How many?", "targets": [{"expr": "up"}]},
        {"title": "Nodes", "type": "row", "panels": [{"title": "All nodes"}]},
    ],
}


def changed(change: str, to: str) -> Json:
    """Return the board with another text."""
    board: Json = json.loads(json.dumps(BOARD).replace(change, to))
    return board


@pytest.mark.parametrize("text", ["GPUs", "Nodes", "up", "Fleet"])
def test_a_picture_of_a_board_shows_its_first_screen(text: str) -> None:
    """Another title or query is another picture."""
    assert shown.first_screen(changed(text, "other")) != shown.first_screen(BOARD)


@pytest.mark.parametrize("text", ["How many?", "All nodes"])
def test_a_picture_of_a_board_does_not_show_what_is_opened(text: str) -> None:
    """Descriptions and folded panels are not in the picture."""
    assert shown.first_screen(changed(text, "other")) == shown.first_screen(BOARD)


SCRIPT = """// Draw a rank.
import { tag } from "./dom.js";
export const rank = (name) => tag("p", `Rank ${name}`); /* one line */
"""


@pytest.mark.parametrize(
    ("old", "new", "is_seen"),
    [
        ("Draw a rank.", "Draw one rank.", False),
        ("one line", "two lines", False),
        ("./dom.js", "./markup.js", False),
        ("const rank", "const drawn", False),
        ("`Rank ", "`Rank #", True),
    ],
)
def test_a_picture_of_a_page_shows_its_texts(
    tmp_path: Path, old: str, new: str, is_seen: bool
) -> None:
    """A comment, a name or an import is not in the picture; a text is."""
    file = tmp_path / "rank.js"
    file.write_text(SCRIPT)
    before = shown.page([file])
    file.write_text(SCRIPT.replace(old, new))

    assert (shown.page([file]) != before) == is_seen
