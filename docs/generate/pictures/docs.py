"""Draw the pictures of the documentation that are older than what they show: `make pictures`."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from os import environ

from docs.generate.pictures import shown
from docs.generate.pictures.drawing import BOARDS, RECORDING_OF, Drawing, draw
from docs.generate.pictures.recorder import BUILD, ROOT

DOCS = ROOT / "docs"
STAMPS = DOCS / "pictures" / "drawn.json"
"""For each picture, a hash of what it showed when it was drawn."""
LIVE = ROOT / "exporter" / "src" / "torchmem" / "exporter" / "live" / "static"
_MAP = re.compile(r"map|^file_|^memory_layout")
_OTHERS = re.compile(rf"{_MAP.pattern}|^report_|uplot|worker|pickle")
"""Files of the page whose texts and styles are not in the pictures of the demo."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Pictures that are drawn together; `shows` has what each of them shows, by its path in docs.

    `draw` writes all of them.
    """

    shows: Mapping[str, Callable[[], str]]
    draw: Callable[[], None]


def _board(name: str) -> Subject:
    show = partial(_first_screen, name)
    return Subject({f"pictures/{name}.png": show}, partial(_draw_board, name))


def _first_screen(name: str) -> str:
    return shown.first_screen(json.loads((BOARDS / f"{name}.json").read_text()))


def _draw_board(name: str) -> None:
    """Write the first screen of a board, with 256 colors."""
    from PIL import Image

    drawing = Drawing(name, RECORDING_OF[name], first_screen=True)
    draw([drawing], BUILD / "docs")
    with Image.open(BUILD / "docs" / f"{drawing.name}.png") as picture:
        picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
            DOCS / "pictures" / f"{name}.png", optimize=True
        )


def _live_page() -> str:
    return shown.page(file for file in LIVE.iterdir() if not _OTHERS.search(file.name))


def _map() -> str:
    return shown.page(file for file in LIVE.iterdir() if _MAP.search(file.name))


def _draw_demo() -> None:
    from docs.generate.pictures import from_demo

    from_demo.draw(DOCS)


def _draw_maps() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/live/test_map_pictures.py"]
    subprocess.run(command, cwd=ROOT, env=environ | {"WRITE_PICTURES": "1"}, check=True)


def _top() -> str:
    return (ROOT / "tests" / "top" / "golden" / "once.txt").read_text()


SUBJECTS: Mapping[str, Subject] = {
    **{name: _board(name) for name in RECORDING_OF},
    "demo": Subject(
        {
            "demo.webp": _live_page,
            "pictures/live-page.png": _live_page,
            "pictures/live-page-dark.png": _live_page,
            "pictures/live-page-phone.png": _live_page,
            "pictures/top.png": _top,
        },
        _draw_demo,
    ),
    "maps": Subject(
        {"pictures/live-page-map.png": _map, "pictures/live-page-file.png": _map}, _draw_maps
    ),
}


def stale() -> dict[str, list[str]]:
    """Return the pictures that are older than what they show, by the subject that draws them."""
    stamps = _stamps()
    older = {
        name: [path for path, show in subject.shows.items() if stamps.get(path) != _hash(show())]
        for name, subject in SUBJECTS.items()
    }
    return {name: paths for name, paths in older.items() if paths}


def _stamps() -> dict[str, str]:
    stamps: dict[str, str] = json.loads(STAMPS.read_text()) if STAMPS.exists() else {}
    return stamps


def _stamp(name: str) -> None:
    """Note that the pictures of a subject show what there is now."""
    new = {path: _hash(show()) for path, show in SUBJECTS[name].shows.items()}
    STAMPS.write_text(json.dumps(_stamps() | new, indent=1, sort_keys=True) + "\n")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> int:
    """Draw what the command line asks for and return the exit code."""
    arguments = _arguments()
    names: Collection[str] = arguments.subjects or (SUBJECTS if arguments.all else stale())
    for name in names:
        begun = time.monotonic()
        if not arguments.same:
            SUBJECTS[name].draw()
        _stamp(name)
        print(f"{name}: {', '.join(SUBJECTS[name].shows)}, {time.monotonic() - begun:.0f} s")
    if not names:
        print("Every picture shows what there is now.")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make pictures ARGS=...", description=__doc__)
    add = parser.add_argument
    add("subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}")
    add("--all", action="store_true", help="also draw pictures that are up to date")
    add(
        "--same",
        action="store_true",
        help="draw nothing: you looked, and the pictures still show what there is",
    )
    arguments = parser.parse_args()
    unknown = set(arguments.subjects) - set(SUBJECTS)
    if unknown:
        parser.error(f"there is no subject {min(unknown)}: choose from {', '.join(SUBJECTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
