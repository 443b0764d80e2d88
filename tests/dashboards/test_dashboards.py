"""The dashboards are current, complete to a newcomer, and ask only for series that exist."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import promql

FOLDER = promql.ROOT / "dashboards" / "json"
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
PANELS: dict[str, dict[str, Any]] = {
    f"{name}: {panel['title']}": panel
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
}
QUERIES = {f"{name} {target['refId']}": target["expr"] for name, panel in PANELS.items() for target in panel["targets"]}
# The panel types whose series need a name; the others show one number, a bucket or a table.
LEGEND_TYPES = {"timeseries"}


def substituted(expression: str) -> str:
    """The expression as Grafana would send it, with its variables filled in."""
    return re.sub(r"\$\w+", "x", re.sub(r"\$__\w+", "5m", expression))


def test_the_committed_json_is_current(root: Path) -> None:
    """What Grafana is given is what the Python describes."""
    pytest.importorskip("grafana_foundation_sdk", reason="the dashboards' generator needs Python 3.11")
    command = [sys.executable, "dashboards/build.py", "--check"]
    built = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (0, "") == (built.returncode, built.stderr)


@pytest.mark.parametrize("expression", QUERIES.values(), ids=QUERIES)
def test_a_query_reads_only_series_and_labels_that_exist(expression: str) -> None:
    """Every metric and label of every panel is in the catalogue or recorded by a rule."""
    assert promql.complaints(substituted(expression)) == []


@pytest.mark.parametrize("expression", QUERIES.values(), ids=QUERIES)
def test_a_query_follows_the_choices_above_the_dashboard(expression: str) -> None:
    """Each selector is narrowed by every variable whose label its series has; the list of live ranks needs none."""
    filters = {"instance": "$node", "uuid": "$gpu", "run": "$run", "rank": "$rank"}
    known = promql.series()
    for name, labels in promql.selectors(substituted(expression)):
        if not name.endswith(":live"):
            assert filters.keys() & known[name] <= labels, name


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_a_panel_explains_itself(panel: dict[str, Any]) -> None:
    """Title, description, unit, a sentence for the empty state and the chosen data source are set."""
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert defaults["unit"]
    assert defaults["noValue"]
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert [{"type": "prometheus", "uid": "${datasource}"}] * len(sources) == sources
    if panel["type"] in LEGEND_TYPES:
        assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_red_means_that_something_ended(panel: dict[str, Any]) -> None:
    """The only red thing is the state oom."""
    for override in panel["fieldConfig"]["overrides"]:
        if "red" in re.findall(r"\bred\b", json.dumps(override["properties"])):
            assert override["matcher"]["options"] in {"oom", "State"}
    assert "red" not in json.dumps(panel["fieldConfig"]["defaults"].get("thresholds", {}))


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_panels_have_their_own_number_and_place(board: dict[str, Any]) -> None:
    """Ids are unique, nothing overlaps, nothing leaves the grid of 24 columns."""
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [cell for panel in board["panels"] for cell in _cells(panel["gridPos"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def _cells(place: dict[str, int]) -> list[tuple[int, int]]:
    columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return list(itertools.product(columns, rows))


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_the_variables_narrow_from_left_to_right(board: dict[str, Any]) -> None:
    """Data source, run, node, GPU and rank can be chosen, all but the first several at once."""
    variables = board["templating"]["list"]
    assert ["datasource", "run", "node", "gpu", "rank"] == [variable["name"] for variable in variables]
    assert all(variable["multi"] and variable["includeAll"] for variable in variables[1:])
    for index, variable in enumerate(variables):
        used = set(re.findall(r'"\$(\w+)"', variable["query"]))
        assert used <= {left["name"] for left in variables[:index]}


def test_the_stack_shows_every_part_of_a_device() -> None:
    """Each part that the recording rules know is an area of the stack, so that the areas add up to the device."""
    recorded = {rule["labels"]["part"] for rule in promql.rules("record") if "part" in rule.get("labels", {})}
    assert recorded == set(re.findall(r'part="(\w+)"', " ".join(QUERIES.values())))


def test_links_to_a_dashboard_survive_its_edits() -> None:
    """A dashboard's uid never changes."""
    assert {"training-memory": "torchmem-training-memory"} == {name: board["uid"] for name, board in BOARDS.items()}
