"""Every panel explains itself to a newcomer and has the same style."""

from __future__ import annotations

import json
import re

import pytest
from support.dashboards import BOARDS, PANELS, Json

each_panel = pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
# Types that Grafana 11, 12 and 13 support; graph, table-old, singlestat and worldmap are gone.
TYPES = {"heatmap", "stat", "state-timeline", "status-history", "table", "timeseries"}


@each_panel
def test_a_panel_explains_itself(panel: Json) -> None:
    """Title, description, unit, text without data, and the selected data source are set."""
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["title"]
    assert panel["description"].endswith((".", "?"))
    assert "?" in panel["description"]
    assert defaults["unit"]
    assert defaults["noValue"]
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert [{"type": "prometheus", "uid": "${datasource}"}] * len(sources) == sources


@each_panel
def test_a_series_has_a_name(panel: Json) -> None:
    """Legends name each line, row, and one of several numbers."""
    assert panel["type"] in TYPES
    if panel["type"] not in {"stat", "table"}:
        assert all(target["legendFormat"] for target in panel["targets"])
    if panel["type"] == "timeseries":
        assert panel["options"]["legend"]["showLegend"]


@each_panel
def test_a_query_has_a_unique_letter(panel: Json) -> None:
    """Grafana identifies the queries of a panel by the letters A to Z."""
    letters = [target["refId"] for target in panel["targets"]]
    assert [chr(ord("A") + index) for index in range(len(letters))] == letters
    assert len(letters) <= 26


def test_panel_titles_are_unique() -> None:
    """No two panels of a dashboard have the same title."""
    for board in BOARDS.values():
        titles = [panel["title"] for panel in board["panels"] if panel["type"] != "row"]
        assert len(set(titles)) == len(titles)


@each_panel
def test_red_means_failed(panel: Json) -> None:
    """Only the states oom and failed, critical alerts and failed collectors are red."""
    config = panel["fieldConfig"]
    for override in config["overrides"]:
        if re.search(r'"(dark-|semi-dark-|light-)?red"', json.dumps(override["properties"])):
            assert override["matcher"]["options"] in {"oom", "failed", "State", "Severity"}
    assert "red" not in json.dumps(config["defaults"].get("thresholds", {})).replace("reduce", "")
    for mapping in config["defaults"].get("mappings", []):
        assert {
            item["text"] for item in mapping["options"].values() if item.get("color") == "red"
        } <= {"oom", "failed"}


def test_a_series_has_the_same_color_everywhere() -> None:
    """A series name has one color on all dashboards, also each state, cause and part of memory."""
    panels = pytest.importorskip("dashboards.panels", reason="the generator needs Python 3.11")
    seen: dict[str, set[str]] = {}
    for panel in PANELS.values():
        for override in panel["fieldConfig"]["overrides"]:
            for item in override["properties"]:
                if (
                    item["id"] == "color"
                    and override["matcher"]["id"] == "byName"
                    and panel["type"] != "table"
                ):
                    seen.setdefault(override["matcher"]["options"], set()).add(
                        item["value"]["fixedColor"]
                    )
    assert [] == [name for name, colors in seen.items() if len(colors) > 1]
    for name, color in [*panels.STATES.items(), *panels.CAUSES.items(), *panels.PARTS.values()]:
        assert seen[name] == {color}


@pytest.mark.parametrize(
    "panel",
    [panel for panel in PANELS.values() if panel["type"] == "table"],
    ids=lambda panel: panel["title"],
)
def test_a_table_shows_no_raw_column(panel: Json) -> None:
    """Every label that a query returns has a heading or is hidden; links use existing headings."""
    (options,) = [item["options"] for item in panel["transformations"] if item["id"] == "organize"]
    handled = set(options["renameByName"]) | {
        name for name, out in options["excludeByName"].items() if out
    }
    for target in panel["targets"]:
        grouped = re.match(r"(?:\d+ \* )?(?:label_join\()?\w+ by \(([^)]*)\)", target["expr"])
        assert grouped, target["expr"]
        assert set(grouped[1].split(", ")) <= handled
    headings = set(options["renameByName"].values())
    assert (
        set(re.findall(r"__data\.fields\[\\?[\"']([^\"'\\]+)", json.dumps(panel["fieldConfig"])))
        <= headings
    )


def test_links_in_tables_open_dashboards() -> None:
    """Links keep the time range and data source, and set a variable that the dashboard has."""
    uids = {
        board["uid"]: {item["name"] for item in board["templating"]["list"]}
        for board in BOARDS.values()
    }
    text = json.dumps([panel["fieldConfig"] for panel in PANELS.values()])
    links = re.findall(
        r"/d/([\w-]+)\?\$\{__url_time_range\}&\$\{datasource:queryparam\}&var-(\w+)=", text
    )
    assert len(links) == text.count('"url"')
    assert all(variable in uids[uid] for uid, variable in links)
