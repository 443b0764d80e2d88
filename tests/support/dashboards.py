"""The shipped dashboards, their panels and their queries, read from dashboards/json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

Json = dict[str, Any]

FOLDER = Path(__file__).resolve().parents[2] / "dashboards" / "json"
BOARDS: dict[str, Json] = {
    path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))
}


def panels_of(board: Json) -> list[Json]:
    """Return the panels of a dashboard in order, also those in collapsed rows."""
    return [
        each
        for panel in board["panels"]
        for each in (panel.get("panels") or [] if panel["type"] == "row" else [panel])
    ]


PANELS: dict[str, Json] = {
    f"{name}: {panel['title']}": panel
    for name, board in BOARDS.items()
    for panel in panels_of(board)
}
# By dashboard, panel and the letter of the query; also the marks on the time axis.
QUERIES: dict[str, str] = {
    f"{name} {target['refId']}": target["expr"]
    for name, panel in PANELS.items()
    for target in panel["targets"]
} | {
    f"{name}: {note['name']} (mark)": note["expr"]
    for name, board in BOARDS.items()
    for note in board["annotations"].get("list", [])
}


def filled_in(expression: str, value: str = ".*", span: str = "5m", **variables: str) -> str:
    """Return the expression as Grafana sends it: variables have their given value, or `value`."""
    seconds = re.sub(r"\$__range_s\b", "300", expression)
    spans = re.sub(r"\$__\w+", span, seconds.replace(":$__rate_interval]", ":10s]"))
    plain = re.sub(r"\$\{(\w+):pipe\}", r"$\1", spans)
    return re.sub(r"\$([a-zA-Z]\w*)", lambda match: variables.get(match[1], value), plain)
