"""The variables for cluster, namespace, team and user, and what they filter."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support import promtool
from support.dashboards import BOARDS, QUERIES, Json, filled_in

from torchmem.cli.main import main

OPTIONAL = ("cluster", "namespace", "team", "user")
GPUS = "run:torchmem_gpus:count"
LAUNCHES = {
    f'{GPUS}{{job="torchmem",run="a",launch="1-a",user="mia",team="vision"}}': "1",
    f'{GPUS}{{job="torchmem",run="b",launch="2-b",user="leo",namespace="dev"}}': "1",
}
each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def variable(board: Json, name: str) -> Json:
    """Return a variable of a dashboard."""
    (found,) = [item for item in board["templating"]["list"] if item["name"] == name]
    return dict(found)


@each_board
def test_what_most_fleets_lack_is_hidden_and_filters_nothing(board: Json) -> None:
    """They are hidden, and All also matches series without the label."""
    for name in OPTIONAL:
        found = variable(board, name)
        assert (found["hide"], found["allValue"]) == (2, ".*")
        assert found["current"]["value"] == ["$__all"]
        assert re.fullmatch(found["allValue"], "") is not None


def test_what_a_fleet_has_is_shown(tmp_path: Path) -> None:
    """--show shows variables in the written files, and changes nothing else."""
    assert main(["manifests", "dashboards", "--show", "team, user", "--out", str(tmp_path)]) == 0

    for name, board in BOARDS.items():
        written = json.loads((tmp_path / f"{name}.json").read_text())
        for label in OPTIONAL:
            assert variable(written, label).get("hide") == (
                None if label in {"team", "user"} else 2
            )
        for item in board["templating"]["list"]:
            if item["name"] in {"team", "user"}:
                assert variable(written, item["name"]) == {
                    key: value for key, value in item.items() if key != "hide"
                }
        assert written["panels"] == board["panels"]


def test_a_label_that_no_variable_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The error suggests the one that was meant."""
    with pytest.raises(SystemExit, match="2"):
        main(["manifests", "dashboards", "--show", "teams", "--out", "x"])
    assert "did you mean 'team'" in capsys.readouterr().err


def launches(folder: Path, **selected: str) -> set[str]:
    """Return the launches that the dashboards show when these owners are selected."""
    owned = variable(BOARDS["fleet"], "owned")
    query = filled_in(owned["query"], span="20m", **selected)
    expression = query.removeprefix("query_result(").removesuffix(")")
    known = (".*", "1-a", "2-b")
    queries = [
        f'({expression}) and on (launch) label_replace(vector(1), "launch", "{each}", "", "")'
        for each in known
    ]
    answers = promtool.answers(folder, queries, LAUNCHES, [])
    return {each for each, values in zip(known, answers, strict=True) if values}


@pytest.mark.stack
@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ({}, {".*"}),
        ({"team": "vision"}, {"1-a"}),
        ({"user": "(mia|leo)"}, {"1-a", "2-b"}),
        ({"namespace": "dev", "user": "mia"}, set()),
    ],
    ids=["all", "a team", "two users", "nobody"],
)
def test_owners_select_launches(
    tmp_path: Path, selected: dict[str, str], expected: set[str]
) -> None:
    """Without a selection everything is shown; else the launches of the owners."""
    assert launches(tmp_path, **selected) == expected


@pytest.mark.parametrize("name", QUERIES)
def test_a_series_with_a_launch_follows_the_owner(name: str) -> None:
    """Every selector that is filtered by launch is filtered by the owners' launches too."""
    of_launches = QUERIES[name].count('launch=~"$launches"')

    assert QUERIES[name].count('launch=~"${owned:pipe}"') == of_launches
