"""Every panel explains itself to a newcomer and has the same style."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dashboards import BOARDS, PANELS, Json, panels_of

from torchmem.sample import colors

each_panel = pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
# Types that Grafana 11, 12 and 13 support; graph, table-old, singlestat and worldmap are gone.
TYPES = {"heatmap", "stat", "state-timeline", "table", "timeseries"}
TABLE = set(re.findall(r"#[0-9a-f]{6}", Path(colors.__file__).read_text()))


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
        titles = [panel["title"] for panel in panels_of(board)]
        assert len(set(titles)) == len(titles)


def colors_of(panel: Json) -> set[str]:
    """Return every color that a panel names."""
    text = json.dumps(panel["fieldConfig"])
    return set(re.findall(r'"(?:color|fixedColor)": "([^"]*)"', text))


@each_panel
def test_every_color_is_in_the_table(panel: Json) -> None:
    """Panels use the colors of torchmem.sample.colors, the color of text, and no others."""
    assert colors_of(panel) <= TABLE | {"text", "transparent"}


def named_colors() -> Iterator[tuple[str, str]]:
    """Yield the name and color of each series and each value that has a color of its own."""
    for panel in PANELS.values():
        legends = {target["refId"]: target.get("legendFormat") for target in panel["targets"]}
        for override in panel["fieldConfig"]["overrides"]:
            matcher, properties = override["matcher"], override["properties"]
            values = {item["id"]: item["value"] for item in properties}
            if matcher["id"] == "byFrameRefID" and "color" in values:
                yield legends[matcher["options"]], values["color"]["fixedColor"]
            for mapping in values.get("mappings", []):
                for name, shown in mapping["options"].items():
                    if "color" in shown:
                        yield name, shown["color"]


def test_a_name_has_the_same_color_everywhere() -> None:
    """A state, cause, severity or part of memory has the color of the table on all dashboards."""
    seen: dict[str, set[str]] = {}
    for name, color in named_colors():
        seen.setdefault(name, set()).add(color)
    panels = pytest.importorskip("dashboards.panels", reason="the generator needs Python 3.11")
    expected = {**colors.STATES, **colors.CAUSES, **colors.SEVERITIES} | {
        legend: colors.PARTS[part] for part, legend in panels.PARTS.items()
    }
    assert {name: {color} for name, color in expected.items() if name in seen} == {
        name: shades for name, shades in seen.items() if name in expected
    }
    assert set(panels.PARTS.values()) <= set(seen)


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
    assert len(links) == len(re.findall(r'"url": "/d/', text))
    assert all(variable in uids[uid] for uid, variable in links)


def test_an_alert_links_to_its_runbook() -> None:
    """A click on an alert opens the page that Prometheus serves, through Grafana's data source."""
    (column,) = [
        override
        for override in PANELS["fleet: Firing alerts"]["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == "Alert"
    ]
    (url,) = re.findall(r'"url": "([^"]+)"', json.dumps(column))
    page = url.replace("${__value.raw}", "TorchmemGpuLost")
    assert page.endswith("/user/docs/runbooks/TorchmemGpuLost.md")
    assert page.startswith("/api/datasources/proxy/uid/${datasource:raw}/")
