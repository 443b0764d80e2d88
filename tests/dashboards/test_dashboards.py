"""The dashboards are current, fit on the screen, and lead to each other."""

from __future__ import annotations

import itertools
import re

import pytest
from support import promql
from support.dashboards import BOARDS, Json

each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def test_links_to_a_dashboard_survive_its_edits() -> None:
    """A dashboard's uid never changes."""
    assert {
        "fleet": "torchmem-fleet",
        "training-memory": "torchmem-training-memory",
        "node": "torchmem-node",
        "oom": "torchmem-oom",
        "self": "torchmem-self",
    } == {name: board["uid"] for name, board in BOARDS.items()}


def test_alerts_lead_to_dashboards_that_exist() -> None:
    """The link of every alert opens one of these dashboards and sets variables that it has."""
    variables = {
        board["uid"]: {item["name"] for item in board["templating"]["list"]}
        for board in BOARDS.values()
    }
    for alert in promql.rules("alert"):
        path, _, chosen = (
            alert["annotations"].get("dashboard_url", "/d/torchmem-fleet").partition("?")
        )
        assert path.removeprefix("/d/") in variables, alert["alert"]
        assert set(re.findall(r"var-(\w+)=", chosen)) <= variables[path.removeprefix("/d/")]


@each_board
def test_a_dashboard_says_what_it_is_for(board: Json) -> None:
    """Title, description, tag, a recent time range and a refresh that Prometheus bears are set; nobody edits it."""
    assert board["title"]
    assert board["description"].endswith(".")
    assert ["torchmem"] == board["tags"]
    assert re.fullmatch(r"now-[16]h", board["time"]["from"])
    assert "30s" == board["refresh"]
    assert board["editable"] is False


@each_board
def test_a_dashboard_leads_to_all_others(board: Json) -> None:
    """Above the panels stands a link to every other dashboard, which keeps the choice and the time."""
    others = {
        f"/d/{other['uid']}": other["title"] for other in BOARDS.values() if other is not board
    }
    assert others == {link["url"]: link["title"] for link in board["links"]}
    assert all(
        link["includeVars"] and link["keepTime"] and not link["targetBlank"]
        for link in board["links"]
    )


@each_board
def test_panels_have_their_own_number_and_place(board: Json) -> None:
    """Ids are unique, nothing overlaps, nothing leaves the grid of 24 columns, and no row ends ragged."""
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [cell for panel in board["panels"] for cell in _cells(panel["gridPos"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert len(cells) == 24 * (1 + max(y for _, y in cells))


def _cells(place: dict[str, int]) -> list[tuple[int, int]]:
    columns, rows = (
        range(place["x"], place["x"] + place["w"]),
        range(place["y"], place["y"] + place["h"]),
    )
    return list(itertools.product(columns, rows))


@each_board
def test_the_variables_narrow_from_left_to_right(board: Json) -> None:
    """Data source, run, node, GPU and rank can be chosen, all but the first several at once."""
    variables = board["templating"]["list"]
    assert ["datasource", "run", "node", "gpu", "rank"] == [
        variable["name"] for variable in variables[:5]
    ]
    assert all(variable["multi"] and variable["includeAll"] for variable in variables[1:5])
    for index, variable in enumerate(variables):
        if variable.get("hide"):
            continue
        used = set(re.findall(r'"\$(\w+)"', variable["query"]))
        assert used <= {left["name"] for left in variables[:index] if not left.get("hide")}


def test_two_runs_can_be_compared() -> None:
    """Training memory has a choice more: one run, none at first."""
    compare = BOARDS["training-memory"]["templating"]["list"][5]
    assert ("compare", False, "none") == (
        compare["name"],
        compare["multi"],
        compare["current"]["value"],
    )
