"""The dashboards are up to date, fit on the screen, and link to each other."""

from __future__ import annotations

import itertools
import re

import pytest
from support import promql
from support.dashboards import BOARDS, Json, panels_of

each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def test_the_uid_of_a_dashboard_is_stable() -> None:
    """Links to a dashboard stay valid because its uid never changes."""
    assert {name: board["uid"] for name, board in BOARDS.items()} == {
        "fleet": "torchmem-fleet",
        "training-memory": "torchmem-training-memory",
        "node": "torchmem-node",
        "oom": "torchmem-oom",
        "self": "torchmem-self",
    }


def test_alerts_link_to_dashboards_that_exist() -> None:
    """The link of every alert opens one of the dashboards and sets variables that it has."""
    variables = {
        board["uid"]: {item["name"] for item in board["templating"]["list"]}
        for board in BOARDS.values()
    }
    for alert in promql.rules("alert"):
        path, _, query = (
            alert["annotations"].get("dashboard_url", "/d/torchmem-fleet").partition("?")
        )
        assert path.removeprefix("/d/") in variables, alert["alert"]
        assert set(re.findall(r"var-(\w+)=", query)) <= variables[path.removeprefix("/d/")]


@each_board
def test_a_dashboard_describes_itself(board: Json) -> None:
    """Title, description, tag, time range and refresh are set, and it is read-only in Grafana."""
    assert board["title"]
    assert board["description"].endswith(".")
    assert board["tags"] == ["torchmem"]
    assert re.fullmatch(r"now-[16]h", board["time"]["from"])
    assert board["refresh"] == "30s"
    assert board["editable"] is False


@each_board
def test_a_mark_of_a_time_is_at_that_time(board: Json) -> None:
    """A mark whose query returns a time stands at it once, not at every step since."""
    for mark in board["annotations"]["list"]:
        assert ("_timestamp_seconds" in mark["expr"]) == mark["useValueForTime"], mark["name"]


@each_board
def test_a_dashboard_links_to_all_others(board: Json) -> None:
    """Links above the panels open every other dashboard with the same selection and time."""
    others = {
        f"/d/{other['uid']}": other["title"] for other in BOARDS.values() if other is not board
    }
    assert others == {link["url"]: link["title"] for link in board["links"]}
    assert all(
        link["includeVars"] and link["keepTime"] and not link["targetBlank"]
        for link in board["links"]
    )


@each_board
def test_panels_have_unique_ids_and_fill_the_grid(board: Json) -> None:
    """Ids are unique, panels do not overlap, and rows fill the 24 columns of the grid."""
    ids = [*{id(panel): panel["id"] for panel in [*board["panels"], *panels_of(board)]}.values()]
    assert len(set(ids)) == len(ids)
    cells = [cell for panel in board["panels"] for cell in _cells(panel["gridPos"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert len(cells) == 24 * (1 + max(y for _, y in cells))


def _cells(position: dict[str, int]) -> list[tuple[int, int]]:
    columns, rows = (
        range(position["x"], position["x"] + position["w"]),
        range(position["y"], position["y"] + position["h"]),
    )
    return list(itertools.product(columns, rows))


@each_board
def test_the_variables_filter_from_left_to_right(board: Json) -> None:
    """Data source, target, owner, run, launch, instance, GPU and rank can be selected.

    Training memory is about one run and its newest launch; the others begin with all of them.
    """
    variables = board["templating"]["list"]
    is_of_one_run = "training-memory" in board["uid"]
    assert [variable["name"] for variable in variables[:12]] == [
        "datasource",
        *("cluster", "job", "namespace", "team", "user", "owned", "run"),
        "launch" if is_of_one_run else "launches",
        *("instance", "gpu", "rank"),
    ]
    assert all(variable["multi"] for variable in variables[1:12])
    without_all = {item["name"] for item in variables[1:12] if not item["includeAll"]}
    assert without_all == ({"run", "launch"} if is_of_one_run else set())
    for index, variable in enumerate(variables):
        if variable.get("hide"):
            continue
        filters = set(re.findall(r'"\$(\w+)"', variable["query"]))
        assert filters <= {left["name"] for left in variables[:index]}


def test_two_runs_can_be_compared() -> None:
    """Training memory has one more variable: a single run, initially none."""
    compare = BOARDS["training-memory"]["templating"]["list"][12]
    assert (
        compare["name"],
        compare["multi"],
        compare["current"]["value"],
    ) == ("compare", False, "none")
