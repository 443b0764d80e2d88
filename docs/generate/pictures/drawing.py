"""Boards drawn by Grafana's packages in Chromium: a picture and a report of each."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.generate.pictures.recorder import BUILD, ROOT, fingerprint, locked, recorded, served
from docs.generate.pictures.recordings import END
from support import needs

Json = dict[str, Any]
BOARDS = ROOT / "dashboards" / "json"
PACKAGES = ROOT / "tests" / "grafana"
CHROMIUM = "chromium"

# The recording that a board is drawn from unless another one is asked for.
RECORDING_OF = {
    "fleet": "fleet",
    "training-memory": "restarts",
    "oom": "restarts",
    "node": "restarts",
    "self": "restarts",
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """One board as it is to be drawn; `variables` are texts or values by the variable's name.

    `file` is the board's JSON, by default the shipped one. With `first_screen` the picture ends
    where a screen of 1080 pixels does.
    """

    board: str
    recording: str
    theme: str = "dark"
    width: int = 1600
    open_rows: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    range: str | None = None
    first_screen: bool = False
    file: Path | None = None

    @property
    def name(self) -> str:
        """Return the name of its files."""
        usual = self.recording == RECORDING_OF.get(self.board)
        parts = [self.board, *([] if usual else [self.recording]), self.theme]
        parts += [] if self.width == 1600 else [str(self.width)]
        return "-".join([*parts, *(["open"] if self.open_rows else [])])

    @property
    def source(self) -> Path:
        """Return the file of the board."""
        return self.file or BOARDS / f"{self.board}.json"

    def job(self, folder: Path) -> Json:
        """Return what draw.mjs is told, but for the address of Prometheus."""
        return {
            "board": str(self.source),
            "at": END * 1000,
            "theme": self.theme,
            "width": self.width,
            "openRows": self.open_rows,
            "variables": dict(self.variables),
            "range": self.range,
            "firstScreen": self.first_screen,
            "picture": str(folder / f"{self.name}.png"),
            "report": str(folder / f"{self.name}.json"),
        }


def draw(drawings: Iterable[Drawing], folder: Path = BUILD) -> dict[Drawing, Json]:
    """Write NAME.png and NAME.json for each drawing unless they are up to date; return the reports.

    The reports have what the jobs have, and a `key` that changes with everything they depend on.
    """
    wanted = list(drawings)
    recordings = recorded(dict.fromkeys(drawing.recording for drawing in wanted))
    with locked(folder / "lock"), ExitStack() as stack:
        stale = [
            (drawing, key)
            for drawing in wanted
            for key in [_key(drawing, recordings[drawing.recording], folder)]
            if _report(drawing, folder).get("key") != key
        ]
        needed = dict.fromkeys(drawing.recording for drawing, _ in stale)
        urls = {name: stack.enter_context(served(recordings[name])) for name in needed}
        _run(
            [
                {**drawing.job(folder), "key": key, "prometheus": urls[drawing.recording]}
                for drawing, key in stale
            ],
            folder,
        )
        return {drawing: _report(drawing, folder) for drawing in wanted}


def _key(drawing: Drawing, recording: Path, folder: Path) -> str:
    page = fingerprint([*PACKAGES.glob("*.*"), *PACKAGES.glob("page/*")])
    job = json.dumps(drawing.job(folder))
    parts = [recording.name, page, job, drawing.source.read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _report(drawing: Drawing, folder: Path) -> Json:
    try:
        report: Json = json.loads((folder / f"{drawing.name}.json").read_text())
    except FileNotFoundError:
        return {}
    return report


def missing() -> str | None:
    """Return why nothing can be drawn here, or None."""
    if reason := needs.missing("prometheus", "node", "chromium"):
        return reason
    if not (PACKAGES / "node_modules" / "@grafana" / "ui").exists():
        return "Grafana's packages are not installed: run `npm ci --prefix tests/grafana`"
    return None


def _run(jobs: Sequence[Json], folder: Path) -> None:
    if not jobs:
        return
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    environment = os.environ | {"CHROMIUM": shutil.which(CHROMIUM) or ""}
    command = ["node", str(PACKAGES / "draw.mjs"), str(file)]
    subprocess.run(command, env=environment, check=True)
    file.unlink()
