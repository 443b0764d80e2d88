"""The dashboards query only series that exist, and follow their variables."""

from __future__ import annotations

import re

import pytest
from dashboards.queries import FILTERS
from support import promql
from support.dashboards import BOARDS, PANELS, QUERIES, filled_in

each_query = pytest.mark.parametrize(("name", "expression"), QUERIES.items(), ids=QUERIES)


@each_query
def test_a_query_reads_only_series_and_labels_that_exist(name: str, expression: str) -> None:
    """Every metric and label is in the catalog, recorded by a rule, or Prometheus' own."""
    assert promql.problems(filled_in(expression, "x")) == []


@each_query
def test_a_query_follows_the_variables(name: str, expression: str) -> None:
    """Each selector is filtered by every visible variable whose label its series has.

    The join with live ranks is an exception: the other side is filtered already.
    """
    board = BOARDS[name.partition(":")[0]]
    variables = board["templating"]["list"]
    visible = {f"${item['name']}" for item in variables if not item.get("hide")}
    if "$launch" in visible:  # what it selects is in the other one
        visible.add("$launches")
    visible |= {"$cluster", "$namespace", "$team", "$user"}  # once they are shown
    filters = {label for label, variable in FILTERS.items() if variable in visible}
    known = promql.series()
    for series, labels in promql.selectors(filled_in(expression, "x")):
        if not series.endswith(":live"):
            assert filters & known[series] & _declared(series) <= labels, series


def _declared(series: str) -> set[str]:
    """Return the labels of a series without the facts of an info metric, which are not filtered."""
    return promql.series()[series] - promql.FACTS.get(series, set())


@each_query
def test_a_rate_fits_the_resolution(name: str, expression: str) -> None:
    """Rates use Grafana's interval or the time range, never a fixed range or irate."""
    for function in re.findall(r"\b(rate|irate|increase)\(", expression):
        assert function != "irate"
    assert not re.search(r"\[\d", expression)


@pytest.mark.parametrize("name", BOARDS)
def test_the_variables_query_series_that_exist(name: str) -> None:
    """The query of each variable names a series and one of its labels."""
    for variable in BOARDS[name]["templating"]["list"][1:]:
        query = filled_in(variable["query"])
        listed = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        if listed:
            assert promql.problems(listed[1]) == []
            ((series, _),) = promql.selectors(listed[1])
            assert listed[2] in promql.series()[series] | promql.EXTERNAL_LABELS
        else:
            assert promql.problems(query.removeprefix("query_result(").removesuffix(")")) == []


def test_the_stack_shows_every_part_of_a_device() -> None:
    """Each part that the recording rules know is an area, so the areas add up to the device."""
    recorded = {
        rule["labels"]["part"]
        for rule in promql.rules("record")
        if "part" in rule.get("labels", {})
    }
    stacks: dict[str, set[str]] = {}
    for name, expression in QUERIES.items():
        stacks.setdefault(name.rpartition(" ")[0], set()).update(
            re.findall(r'memory_bytes:sum{[^}]*\bpart="(\w+)"', expression)
        )
    assert [recorded] * 4 == [parts for parts in stacks.values() if len(parts) > 1]


NUMBERS = [name for name, panel in PANELS.items() if panel["type"] in {"stat", "table"}]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_one_definition_on_all_dashboards(name: str) -> None:
    """Numbers and tables read the lowest headroom of 5 minutes, and OOMs within a window.

    A snapshot's headroom is that of a random moment, and a counter's value that since the start.
    """
    for target in PANELS[name]["targets"]:
        query = filled_in(target["expr"])
        assert "torchmem_headroom_bytes{" not in query
        if "sum" in query and "torchmem_ooms_total" in query:
            assert "last_over_time(rank:torchmem_ooms:positive" in query
            assert "offset" in query
