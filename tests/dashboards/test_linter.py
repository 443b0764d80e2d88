"""The dashboards follow the rules of Grafana's dashboard-linter, but for the exclusions in .lint.

Each rule here has the name and the conditions of https://github.com/grafana/dashboard-linter. The
program itself gives the same answers: `dashboard-linter lint --strict -c dashboards/.lint FILE`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from support.dashboards import BOARDS, Json, filled_in, panels_of
from support.promql import nodes

EXCLUSIONS = yaml.safe_load(
    (Path(__file__).resolve().parents[2] / "dashboards" / ".lint").read_text()
)["exclusions"]
CHECKED = {"stat", "gauge", "table", "timeseries"}
WITH_QUERIES = CHECKED | {"state-timeline"}
# The units of dashboard-linter that these dashboards use.
UNITS = {
    *("none", "short", "string", "bytes", "binBps", "percentunit", "s", "dtdurations", "m"),
    *("dateTimeFromNow", "watt", "kwatth", "celsius", "hertz"),
}

Found = Iterator[tuple[str, str]]
"""The title of a panel, "" for the dashboard, and what is wrong."""


def datasource(board: Json) -> Found:
    """The data source is a variable."""
    sources = [item for item in variables(board) if item["type"] == "datasource"]
    if [(item["name"], item["label"]) for item in sources] != [("datasource", "Data source")]:
        yield "", "the data source is no variable"


def variables(board: Json) -> list[Json]:
    """Return the variables of a dashboard."""
    return list(board["templating"]["list"])


def of_target(name: str) -> Callable[[Json], Found]:
    """Return the rule of the variable for a label of the target."""

    def rule(board: Json) -> Found:
        (variable,) = [item for item in variables(board) if item["name"] == name]
        shown = {key: variable.get(key) for key in ("type", "label", "multi", "allValue")}
        wanted = {"type": "query", "label": name.title(), "multi": True, "allValue": ".+"}
        if shown != wanted or variable["datasource"]["uid"] != "${datasource}":
            yield "", f"the variable {name} is {shown}"

    return rule


def variable_promql(board: Json) -> Found:
    """Queries of variables call a function of Grafana with valid PromQL."""
    for item in variables(board):
        if item["type"] == "query":
            called = re.fullmatch(r"(label_values|query_result)\((.+)\)", item["query"])
            text = called[2] if called else "("
            yield from invalid(
                "", text.rpartition(", ")[0] if called and called[1][0] == "l" else text
            )


def invalid(panel: str, expression: str) -> Found:
    """Yield an expression that is no PromQL."""
    try:
        promql_parser.parse(filled_in(expression))
    except ValueError as error:
        yield panel, f"{expression}: {error}"


def reloads(board: Json) -> Found:
    """Variables follow the time range."""
    for item in variables(board):
        if item["type"] == "query" and item["refresh"] != 2:
            yield "", f"the variable {item['name']} does not follow the time range"


def panel_datasource(board: Json) -> Found:
    """Panels use the variable of the data source."""
    for panel in checked(board, {"table", "timeseries"}):
        if panel["datasource"]["uid"] != "${datasource}":
            yield panel["title"], "another data source"


def checked(board: Json, types: set[str]) -> Iterator[Json]:
    """Yield the panels of some types."""
    return (panel for panel in panels_of(board) if panel["type"] in types)


def title_and_description(board: Json) -> Found:
    """Panels have a title and a description."""
    for panel in checked(board, CHECKED):
        if not (panel["title"] and panel["description"]):
            yield panel["title"], "title or description is missing"


def unit(board: Json) -> Found:
    """The last unit that is set is a known one, unless values have names."""
    for panel in checked(board, CHECKED):
        config = panel["fieldConfig"]
        set_by = [item for override in config["overrides"] for item in override["properties"]]
        units = [item["value"] for item in set_by if item["id"] == "unit"]
        named = config["defaults"].get("mappings") or any(i["id"] == "mappings" for i in set_by)
        last = units[-1] if units else config["defaults"]["unit"]
        if not named and last not in UNITS:
            yield panel["title"], f"unit {last}"


def targets(board: Json) -> Found:
    """Panels have queries."""
    for panel in checked(board, CHECKED):
        if not panel["targets"]:
            yield panel["title"], "no query"


def promql(board: Json) -> Found:
    """Queries are valid."""
    for panel in checked(board, WITH_QUERIES):
        for target in panel["targets"]:
            yield from invalid(panel["title"], target["expr"])


def rate_interval(board: Json) -> Found:
    """Rates are over $__rate_interval."""
    for panel in checked(board, WITH_QUERIES):
        for target in panel["targets"]:
            if re.search(r"\bi?rate\([^[]*\[(?!\$__rate_interval\])", target["expr"]):
                yield panel["title"], target["expr"]


def matcher(label: str) -> Callable[[Json], Found]:
    """Return the rule that every selector is filtered by a label of the target."""

    def rule(board: Json) -> Found:
        for panel in panels_of(board):
            for target in panel["targets"]:
                expression = filled_in(target["expr"], value="x", **{label: f"the_{label}"})
                for node in nodes(promql_parser.parse(expression)):
                    if isinstance(node, promql_parser.VectorSelector) and not is_filtered(
                        node, label
                    ):
                        yield panel["title"], f"{node.name} is not filtered by {label}"

    return rule


def is_filtered(selector: Any, label: str) -> bool:
    """Return whether a selector has the matcher LABEL=~"$LABEL"."""
    return any(
        (each.name, str(each.op), each.value) == (label, "MatchOp.Re", f"the_{label}")
        for each in selector.matchers.matchers
    )


def counters(board: Json) -> Found:
    """Counters without a matcher are rated."""
    for panel in panels_of(board):
        for target in panel["targets"]:
            if re.search(r"_total(?![\w{])", target["expr"]):
                yield panel["title"], target["expr"]


def uneditable(board: Json) -> Found:
    """Grafana refuses changes, which the next provisioning would undo."""
    if board["editable"]:
        yield "", "can be changed"


RULES: dict[str, Callable[[Json], Found]] = {
    "template-datasource-rule": datasource,
    "template-job-rule": of_target("job"),
    "template-instance-rule": of_target("instance"),
    "template-label-promql-rule": variable_promql,
    "template-on-time-change-reload-rule": reloads,
    "panel-datasource-rule": panel_datasource,
    "panel-title-description-rule": title_and_description,
    "panel-units-rule": unit,
    "panel-no-targets-rule": targets,
    "target-promql-rule": promql,
    "target-rate-interval-rule": rate_interval,
    "target-job-rule": matcher("job"),
    "target-instance-rule": matcher("instance"),
    "target-counter-agg-rule": counters,
    "uneditable-dashboard": uneditable,
}


def excluded(rule: str, title: str) -> set[str]:
    """Return the panels of a dashboard to which a rule does not apply."""
    entries = EXCLUSIONS.get(rule, {}).get("entries", [])
    return {entry["panel"] for entry in entries if entry["dashboard"] == title}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_dashboard_follows_the_rule(board: Json, rule: str) -> None:
    """Only the panels that .lint names break a rule, and each of those does."""
    found = dict(RULES[rule](board))

    assert found.keys() == excluded(rule, board["title"]), found


def test_an_exclusion_has_a_reason() -> None:
    """Rules are the linter's, and each exclusion tells why."""
    assert EXCLUSIONS.keys() <= RULES.keys()
    assert all(len(each["reason"]) > 20 for each in EXCLUSIONS.values())
