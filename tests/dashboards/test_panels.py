"""Every panel explains itself to a newcomer and has the same style."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from urllib.parse import unquote

import pytest
from support.dashboards import BOARDS, PANELS, Json, panels_of

from torchmem.explain import thresholds
from torchmem.metrics import colors, memory_parts
from torchmem.metrics.memory_parts import PARTS

each_panel = pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
# Types that Grafana 11, 12 and 13 support; graph, table-old, singlestat and worldmap are gone.
TYPES = {"heatmap", "stat", "state-timeline", "table", "timeseries"}
# "Kubernetes / Compute Resources / Pod" of kubernetes-mixin.
POD_BOARD = "6581e46e4e5c7ba40a07646395ef7b23"
# What is above the panels: the title and the variables.
HEADER_PIXELS = 90
TABLE = {
    color
    for module in (colors, memory_parts)
    for color in re.findall(r"#[0-9a-f]{6}", inspect.getsource(module))
}


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
    """Panels use the colors of torchmem.metrics.colors, the color of text, and no others."""
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
    expected = {**colors.STATES, **colors.CAUSES, **colors.SEVERITIES} | {
        part.title: part.color for part in PARTS.values()
    }
    assert {name: {color} for name, color in expected.items() if name in seen} == {
        name: shades for name, shades in seen.items() if name in expected
    }
    assert {part.title for part in PARTS.values()} <= set(seen)


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
        grouped = re.search(r"\w+ by \(([^)]*)\)", target["expr"])
        assert grouped, target["expr"]
        assert set(grouped[1].split(", ")) <= handled
    headings = set(options["renameByName"].values())
    assert (
        set(re.findall(r"__data\.fields\[\\?[\"']([^\"'\\]+)", json.dumps(panel["fieldConfig"])))
        <= headings
    )


def urls() -> list[str]:
    """Return the URL of every link in a table."""
    return [
        link["url"]
        for panel in PANELS.values()
        for override in panel["fieldConfig"]["overrides"]
        for item in override["properties"]
        if item["id"] == "links"
        for link in item["value"]
    ]


def test_links_in_tables_open_dashboards() -> None:
    """Links keep the data source and the time or that of the row, and set existing variables."""
    uids = {
        board["uid"]: {item["name"] for item in board["templating"]["list"]}
        for board in BOARDS.values()
    }
    for url in urls():
        if url.startswith(f"/d/{POD_BOARD}?"):
            assert {"namespace", "pod"} <= set(re.findall(r"&var-(\w+)=", url))
        elif url.startswith("/d/"):
            uid, _, query = url.removeprefix("/d/").partition("?")
            time, source, variables = query.partition("&${datasource:queryparam}")
            assert re.fullmatch(
                r"\$\{__url_time_range\}|time=\$\{__data.fields\['(When|Newest OOM)'\].numeric\}"
                r"&time.window=1800000",
                time,
            )
            assert source
            assert set(re.findall(r"&var-(\w+)=", variables)) <= uids[uid]


def test_a_slurm_job_opens_its_processes() -> None:
    """The link asks Explore for the processes of the job in the cell."""
    (url,) = {url for url in urls() if url.startswith("/explore?")}
    panes = json.loads(unquote(url.partition("panes=")[2]))
    (query,) = panes["torchmem"]["queries"]

    assert panes["torchmem"]["datasource"] == "${datasource:raw}"
    assert 'slurm_job_id="${__value.raw:percentencode}"' in query["expr"]


def test_links_of_alerts_open_runbooks() -> None:
    """Links to runbooks open pages that Prometheus serves, through its data source in Grafana."""
    pages = {url for url in urls() if not url.startswith(("/d/", "/explore?"))}
    folder = thresholds.defaults().values["runbooks_at"]
    assert pages == {f"/api/datasources/proxy/uid/${{datasource:raw}}{folder}/${{__value.raw}}.md"}


def test_the_text_without_data_fills_no_cell() -> None:
    """In tables, blank cells stay blank; the text is for the whole panel."""
    for panel in PANELS.values():
        if panel["type"] == "table":
            first = panel["fieldConfig"]["overrides"][0]
            assert first["matcher"] == {"id": "byRegexp", "options": ".*"}
            assert first["properties"] == [{"id": "noValue", "value": ""}]


def test_ids_are_text() -> None:
    """Ranks, pids and GPUs in tables have no number's unit, so 4130 does not become 4.13 K."""
    for panel in PANELS.values():
        if panel["type"] == "table":
            assert panel["fieldConfig"]["defaults"]["unit"] == "string"
            for override in panel["fieldConfig"]["overrides"]:
                if override["matcher"]["options"] in {"Rank", "Pid", "GPU"}:
                    assert "unit" not in {item["id"] for item in override["properties"]}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, panel in PANELS.items()
        if panel["type"] == "timeseries" and re.match("training-memory|oom", name)
    ],
)
def test_a_rank_is_one_line(name: str) -> None:
    """No legend has a pid: the newest process continues the line of its rank."""
    for target in PANELS[name]["targets"]:
        assert "{{pid}}" not in target["legendFormat"]
        if "rank #{{rank}}" in target["legendFormat"]:
            assert re.match(r"(max|min) by \(run, launch, rank\) \(", target["expr"])


@pytest.mark.parametrize("name", ["training-memory", "oom"])
def test_the_answer_comes_first(name: str) -> None:
    """At most twelve panels are open, and they fit on a screen of 1080 pixels."""
    board = BOARDS[name]
    opened = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len(opened) <= 12
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in opened)
    assert 38 * bottom + HEADER_PIXELS <= 1080
