"""What is wrong with a drawn board, told from its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
MAX_OPEN_PANELS = 12
SCREEN_HEIGHT = 1080
MIN_NAME_HEIGHT = 14
NO_DATA = "no data"
GRAFANAS_MESSAGE = "No data"
"""What Grafana writes in a panel without a message of its own."""
WITHOUT_PARTS = "total without parts"
UNMATCHED = "override without a field"
DISAGREEMENT = "two answers to one question"
# Panels of different titles that answer one question.
SAME_QUESTION: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: of which kind, in which panel (empty for the board itself), and what exactly."""

    kind: str
    panel: str
    what: str


def findings(report: Json) -> list[Finding]:
    """Return every fault of a drawn board."""
    of_panels = (
        Finding(kind, panel["title"], what)
        for panel in report["panels"]
        for kind, find in PANEL_FAULTS.items()
        for what in find(panel)
    )
    of_board = (
        Finding(kind, "", what) for kind, find in BOARD_FAULTS.items() for what in find(report)
    )
    return [*of_panels, *of_board]


def _query_errors(panel: Json) -> Iterator[str]:
    yield from (query["error"] for query in panel.get("queries", ()) if "error" in query)
    if "failure" in panel:
        yield panel["failure"].splitlines()[0]


def _without_data(panel: Json) -> Iterator[str]:
    if panel["state"] == "empty" and _sentence(panel):
        yield _sentence(panel)


def _without_sentence(panel: Json) -> Iterator[str]:
    """Yield nothing if the panel has data, or says why it has none."""
    if panel["state"] == "empty" and not _sentence(panel):
        yield panel.get("message") or "blank"


def _sentence(panel: Json) -> str:
    message: str = panel.get("message") or ""
    return "" if message == GRAFANAS_MESSAGE else message


def _without_parts(panel: Json) -> Iterator[str]:
    """Several queries without data, and then a line with which they are to be compared."""
    *parts, last = [query.get("series", 0) for query in panel["queries"]] or [0]
    if last and len(parts) > 1 and not any(parts):
        yield "only " + ", ".join(panel["legend"]["labels"])


def _clipped(panel: Json) -> Iterator[str]:
    yield from sorted(set(panel["clipped"]))


def _hidden_legend(panel: Json) -> Iterator[str]:
    hidden = panel["legend"]["hidden"]
    if hidden:
        yield f"{len(hidden)} of {len(panel['legend']['labels'])}, such as {hidden[0]}"


def _repeated_legend(panel: Json) -> Iterator[str]:
    yield from panel["legend"]["repeated"]


def _filled_legend(panel: Json) -> Iterator[str]:
    yield from panel["legend"]["filledBlanks"]


def _of_table(key: str) -> Callable[[Json], Iterable[str]]:
    return lambda panel: (panel.get("table") or {}).get(key, ())


def _unknown_properties(panel: Json) -> Iterator[str]:
    yield from panel.get("unknownProperties", ())


def _overlapping_names(panel: Json) -> Iterator[str]:
    timeline = panel.get("timeline") or {}
    height = timeline.get("rowPixels", MIN_NAME_HEIGHT)
    if height < MIN_NAME_HEIGHT:
        yield f"{len(timeline['rows'])} names, {height} pixels for each"


PANEL_FAULTS: Mapping[str, Callable[[Json], Iterable[str]]] = {
    "query error": _query_errors,
    NO_DATA: _without_data,
    "no data and no sentence": _without_sentence,
    WITHOUT_PARTS: _without_parts,
    "clipped text": _clipped,
    "hidden legend entries": _hidden_legend,
    "repeated legend entries": _repeated_legend,
    "text for no data in a legend": _filled_legend,
    "label shown as a number": _of_table("rewritten"),
    "text for no data in a cell": _of_table("filledBlanks"),
    "column out of sight": _of_table("outOfSight"),
    "unknown property": _unknown_properties,
    "overlapping names": _overlapping_names,
}


def _open_panels(report: Json) -> Iterator[str]:
    count = len(_unfolded(report))
    if count > MAX_OPEN_PANELS:
        yield f"{count} open panels"


def _answer_out_of_sight(report: Json) -> Iterator[str]:
    """What is not in a collapsed row is the board's answer."""
    bottom = max((panel["bottom"] for panel in _unfolded(report)), default=0)
    if bottom > SCREEN_HEIGHT:
        yield f"the open panels end {bottom} pixels from the top"


def _unfolded(report: Json) -> list[Json]:
    return [panel for panel in report["panels"] if not panel["isFolded"]]


def _board_errors(report: Json) -> Iterator[str]:
    yield from report["errors"]
    yield from report["problems"]
    yield from (
        f"variable {variable['name']}: {variable['error']}"
        for variable in report["variables"]
        if variable.get("error")
    )


BOARD_FAULTS: Mapping[str, Callable[[Json], Iterable[str]]] = {
    "query error": _board_errors,
    "too many open panels": _open_panels,
    "answer below the first screen": _answer_out_of_sight,
}


def unmatched_overrides(reports: Iterable[Json]) -> list[Finding]:
    """Return the overrides that match a field in none of these reports of one board."""
    matched: dict[tuple[str, str], bool] = {}
    for report in reports:
        for panel in report["panels"]:
            for override in panel.get("overrides", ()):
                key = (panel["title"], override["name"])
                matched[key] = matched.get(key, False) or override["isMatched"]
    return [
        Finding(UNMATCHED, title, name)
        for (title, name), is_matched in matched.items()
        if not is_matched
    ]


def disagreements(reports: Mapping[str, Json]) -> list[Finding]:
    """Return the stats that show different numbers under one title; `reports` are by board.

    The boards must be drawn from one recording, with the same variables and time range.
    """
    answers: dict[str, dict[str, frozenset[float]]] = defaultdict(dict)
    for board, report in reports.items():
        for panel in report["panels"]:
            if panel["type"] == "stat" and panel.get("values"):
                question = SAME_QUESTION.get(panel["title"], panel["title"])
                numbers = (value["number"] for value in panel["values"])
                answers[question][board] = frozenset(number for number in numbers if number)
    return [
        Finding(DISAGREEMENT, question, ", ".join(_written(by_board)))
        for question, by_board in answers.items()
        if len(set(by_board.values())) > 1
    ]


def _written(by_board: Mapping[str, frozenset[float]]) -> Iterator[str]:
    for board, numbers in by_board.items():
        yield f"{board} {' and '.join(map(str, sorted(numbers))) or 'nothing'}"
