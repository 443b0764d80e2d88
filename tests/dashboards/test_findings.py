"""Each check of the pictures fails on a board that is broken in this way, and on that one alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from docs.generate.pictures.drawing import Drawing, draw, missing
from docs.generate.pictures.findings import (
    BOARD_FAULTS,
    DISAGREEMENT,
    PANEL_FAULTS,
    UNMATCHED,
    Finding,
    disagreements,
    findings,
    unmatched_overrides,
)
from docs.generate.pictures.recordings import END

Json = dict[str, Any]
STATE = "torchmem_process_state"
NAMED = 'label_replace({}, "name", "a series with quite a long name $1", "__name__", "(.*)")'
MANY = NAMED.format('sum by (__name__) ({__name__=~"torchmem_.+_bytes"})')


def target(expr: str, legend: str = "", letter: str = "A", **more: object) -> Json:
    return {"refId": letter, "expr": expr, "legendFormat": legend, **more}


def table(*expressions: str) -> Json:
    targets = [
        target(expression, letter=letter, format="table", instant=True, range=False)
        for letter, expression in zip("ABC", expressions, strict=False)
    ]
    columns = {"id": "organize", "options": {"excludeByName": {"Time": True}}}
    return {"type": "table", "targets": targets, "transformations": [{"id": "merge"}, columns]}


def graph(expr: str, legend: str) -> Json:
    return {"type": "timeseries", "targets": [target(expr, legend)]}


def config(overrides: Mapping[str, Json] | None = None, **defaults: object) -> Json:
    return {
        "defaults": defaults,
        "overrides": [
            {
                "matcher": {"id": "byName", "options": name},
                "properties": [{"id": key, "value": value} for key, value in properties.items()],
            }
            for name, properties in (overrides or {}).items()
        ],
    }


def wide(width: int) -> Json:
    return config(custom={"width": width})


ANY_NUMBER_IS_A_STORY = {
    "type": "range",
    "options": {"from": 0, "to": 1e9, "result": {"text": "a long story that goes on " * 8}},
}
# By kind of fault; of several panels of one kind, what follows the colon tells them apart.
BROKEN: Mapping[str, Json] = {
    "query error": graph("sum(", "x"),
    "no data": graph("no_such_metric", "x") | {"fieldConfig": config(noValue="Not a number yet")},
    "no data and no sentence": table("no_such_metric", "another_metric"),
    "total without parts": {
        "type": "timeseries",
        "targets": [
            target("no_such_metric", "a", "A"),
            target("no_such_metric", "b", "B"),
            target(f"sum({STATE})", "total", "C"),
        ],
    },
    "clipped text": table(f"sum by (run, state) ({STATE})") | {"fieldConfig": wide(24)},
    "clipped text: too high": {
        "type": "stat",
        "targets": [target(f"sum({STATE})", "x", instant=True)],
        "options": {"text": {"valueSize": 60}},
        "fieldConfig": config(mappings=[ANY_NUMBER_IS_A_STORY]),
    },
    "hidden legend entries": graph(MANY, "{{name}}"),
    "repeated legend entries": graph(STATE, "{{run}}"),
    "text for no data in a legend": {
        "type": "timeseries",
        "targets": [target(f"sum({STATE}) and on () vector(time()) < {END - 600}", "x")],
        "options": {"legend": {"displayMode": "table", "placement": "right", "calcs": ["last"]}},
        "fieldConfig": config(noValue="None yet"),
    },
    "label shown as a number": table(f"sum by (pid) ({STATE})")
    | {"fieldConfig": config(unit="short")},
    "text for no data in a cell": table(
        f"sum by (state) ({STATE})", f'sum by (state) ({STATE}{{state="oom"}})'
    )
    | {"fieldConfig": config(noValue="None")},
    "column out of sight": table(f"sum by (run, rank, pid, state) ({STATE})")
    | {"fieldConfig": wide(900)},
    "unknown property": graph(f"sum({STATE})", "x")
    | {"fieldConfig": config({"x": {"custom.lineWidht": 2}})},
    "overlapping names": {
        "type": "state-timeline",
        "targets": [target(MANY, "{{name}}")],
        "options": {"legend": {"showLegend": False}, "perPage": 0},
    },
}
SOUND: Mapping[str, Json] = {
    "a graph": graph(STATE, "{{state}}") | {"fieldConfig": config({"oom": {"unit": "short"}})},
    "a table": table(f"sum by (run, state) ({STATE})") | {"fieldConfig": config(noValue="")},
    "a number": {"type": "stat", "targets": [target(f"sum({STATE})", "x", instant=True)]},
}


def board(panels: Mapping[str, Json], **more: object) -> Json:
    """Return a board with these panels, one below the other, of half a screen's width."""
    placed = [
        panel
        | {"id": number, "title": title, "gridPos": {"x": 0, "y": 7 * number, "w": 12, "h": 7}}
        for number, (title, panel) in enumerate(panels.items())
    ]
    return {"title": "Board", "uid": "board", "time": {"from": "now-30m", "to": "now"}} | {
        "panels": placed,
        **more,
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Json]:
    """The reports of a sound board, a broken one, and one whose variables are broken."""
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("boards")
    unknown = {"type": "query", "name": "run", "query": "label_valeus(up, job)"}
    boards = {
        "sound": board(SOUND),
        "broken": board(BROKEN),
        "variables": board(SOUND, templating={"list": [unknown]}),
        "long": board(
            {f"{title} {number}": panel for number in range(5) for title, panel in SOUND.items()}
        ),
    }
    for name, text in boards.items():
        (folder / f"{name}.json").write_text(json.dumps(text))
    drawings = [
        Drawing(name, "one-rank", file=folder / f"{name}.json", width=1280) for name in boards
    ]
    drawn = draw(drawings, folder / "pictures")
    return {drawing.board: report for drawing, report in drawn.items()}


@pytest.mark.stack
def test_a_sound_board_has_no_faults(reports: dict[str, Json]) -> None:
    """Nothing is found on a board without faults."""
    assert findings(reports["sound"]) == []
    assert unmatched_overrides([reports["sound"]]) == []


@pytest.mark.stack
@pytest.mark.parametrize("kind", PANEL_FAULTS)
def test_a_broken_panel_is_found(reports: dict[str, Json], kind: str) -> None:
    """Each kind of fault is found in the panel that has it, and in no other one."""
    found = {finding.panel for finding in findings(reports["broken"]) if finding.kind == kind}

    assert {title for title in BROKEN if title.partition(":")[0] == kind} == found


@pytest.mark.stack
def test_a_broken_board_is_found(reports: dict[str, Json]) -> None:
    """A broken variable, too many panels, and an answer below the first screen are found."""
    found = [*findings(reports["variables"]), *findings(reports["long"])]

    assert {finding.kind for finding in found if not finding.panel} == set(BOARD_FAULTS)


@pytest.mark.stack
def test_an_override_without_a_field_is_found(reports: dict[str, Json]) -> None:
    """An override is a fault if it matches a field in none of the reports."""
    panels = reports["sound"]["panels"]
    matched = [{**panel, "overrides": [{"name": "oom", "isMatched": True}]} for panel in panels]
    never = [{**panel, "overrides": [{"name": "oom", "isMatched": False}]} for panel in panels[:1]]

    assert [Finding(UNMATCHED, "a graph", "oom")] == unmatched_overrides([{"panels": never}])
    assert unmatched_overrides([{"panels": never}, {"panels": matched}]) == []


def test_two_answers_to_one_question_are_found() -> None:
    """Stats of one title show one number on all boards of one recording."""

    def stat(number: float) -> Json:
        values = [{"title": "rank 3", "text": str(number), "number": number}]
        return {"panels": [{"type": "stat", "title": "Least headroom", "values": values}]}

    assert disagreements({"fleet": stat(4.2), "training": stat(4.2)}) == []
    found = disagreements({"fleet": stat(4.2), "training": stat(19.0)})
    assert [Finding(DISAGREEMENT, "Least headroom", "fleet 4.2, training 19.0")] == found
