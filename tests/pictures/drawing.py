"""Boards drawn by Grafana's packages in Chromium: a picture and a report of each."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictures.recorder import ROOT, served
from pictures.recordings import END

Json = dict[str, Any]
BOARDS = ROOT / "dashboards" / "json"
PACKAGES = ROOT / "tests" / "grafana"
CHROMIUM = Path("/usr/bin/chromium")

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
    """One board as it is to be drawn; `variables` are texts or values by the variable's name."""

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
        return "-".join([*parts, *([] if self.width == 1600 else [str(self.width)])])


def draw(drawings: Iterable[Drawing], folder: Path) -> dict[Drawing, Json]:
    """Write NAME.png and NAME.json for each drawing; return the reports."""
    folder.mkdir(parents=True, exist_ok=True)
    by_recording: dict[str, list[Drawing]] = defaultdict(list)
    for drawing in drawings:
        by_recording[drawing.recording].append(drawing)
    with ExitStack() as stack:
        jobs = [
            _job(drawing, stack_url, folder)
            for recording, group in by_recording.items()
            for stack_url in [stack.enter_context(served(recording))]
            for drawing in group
        ]
        _run(jobs, folder)
    return {
        drawing: json.loads((folder / f"{drawing.name}.json").read_text())
        for group in by_recording.values()
        for drawing in group
    }


def missing() -> str | None:
    """Return why nothing can be drawn here, or None."""
    for program in ("prometheus", "node"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not CHROMIUM.exists():
        return "chromium is not installed"
    if not (PACKAGES / "node_modules" / "@grafana" / "ui").exists():
        return "Grafana's packages are not installed: run `npm ci --prefix tests/grafana`"
    return None


def _job(drawing: Drawing, url: str, folder: Path) -> Json:
    return {
        "board": str(drawing.file or BOARDS / f"{drawing.board}.json"),
        "prometheus": url,
        "at": END * 1000,
        "theme": drawing.theme,
        "width": drawing.width,
        "openRows": drawing.open_rows,
        "variables": dict(drawing.variables),
        "range": drawing.range,
        "firstScreen": drawing.first_screen,
        "picture": str(folder / f"{drawing.name}.png"),
        "report": str(folder / f"{drawing.name}.json"),
    }


def _run(jobs: Sequence[Json], folder: Path) -> None:
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    subprocess.run(["node", str(PACKAGES / "draw.mjs"), str(file)], check=True)
    file.unlink()
