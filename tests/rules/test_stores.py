"""Prometheus and VictoriaMetrics answer all shipped PromQL alike, over one recording of a fleet."""

from __future__ import annotations

import json
import math
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import promql_parser
import pytest
from docs.generate.pictures.history import History, prometheus
from docs.generate.pictures.recordings import ago
from support.dashboards import BOARDS, PANELS, QUERIES, filled_in
from support.needs import needs, skip_without
from support.promql import RULES, nodes, rules
from support.recorded_fleet import record
from support.stack import get, victoria_metrics
from support.waiting import until

Answer = Mapping[str, Mapping[float, float]]
"""Value by time of each series, by its labels."""
Expressions = Mapping[str, tuple[str, bool]]
"""PromQL, and whether it is asked for a range of time, by name."""

TOLERANCE = 0.05
ROUNDING = 1e-4  # of a sum of gigabytes, which VictoriaMetrics adds up in another order
# Between two scrapes: before version 3, Prometheus also counts a sample at the start of a window.
MOMENTS = [ago(minutes) - 12 for minutes in (0, 2, 4, 6, 8, 10, 12)]
STEP = 60
# VictoriaMetrics refuses longer queries (-search.maxQueryLen).
MAX_QUERY_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Stores:
    """URLs of both stores, which have the same samples."""

    prometheus: str
    victoria: str

    def answers(self, text: str, kind: str, **when: float) -> list[Answer]:
        """Return what each of them answers."""
        data = urllib.parse.urlencode({"query": text, "nocache": 1, **when}).encode()
        return [_asked(f"{url}/api/v1/{kind}", data) for url in (self.prometheus, self.victoria)]

    def differences(self, text: str, is_range: bool) -> list[str]:
        """Return what they answer differently."""
        if is_range:
            times = {"start": MOMENTS[-1], "end": MOMENTS[0], "step": STEP}
            return _differences(*self.answers(text, "query_range", **times))
        return [
            difference
            for moment in MOMENTS
            for difference in _differences(*self.answers(text, "query", time=moment))
        ]

    def differing(self, expressions: Expressions) -> list[str]:
        """Return each expression on which they do not agree, with the first difference."""
        found = {name: self.differences(*each) for name, each in expressions.items()}
        return [f"{name}: {differences[0]}" for name, differences in found.items() if differences]

    def without_data(self, expressions: Expressions) -> list[str]:
        """Return the expressions that have no value over the whole time."""
        times = {"start": MOMENTS[-1], "end": MOMENTS[0], "step": STEP}
        return [
            name
            for name, (text, _) in expressions.items()
            if not self.answers(text, "query_range", **times)[0]
        ]


def _asked(url: str, data: bytes) -> Answer:
    with urllib.request.urlopen(url, data, timeout=60) as response:  # noqa: S310 - loopback
        answer = json.load(response)["data"]
    if answer["resultType"] == "scalar":
        answer["result"] = [{"metric": {}, "value": answer["result"]}]
    return {_labels(row["metric"]): _values(row) for row in answer["result"] if _values(row)}


def _labels(metric: Mapping[str, str]) -> str:
    """Return labels without the metric's name, which more functions keep in MetricsQL.

    Rules and boards do not read it. An empty label is an absent one, which MetricsQL may return.
    """
    named = {name: text for name, text in metric.items() if text and name != "__name__"}
    return json.dumps(named, sort_keys=True)


def _values(row: Mapping[str, Any]) -> Mapping[float, float]:
    points = row.get("values") or [row["value"]]
    return {at: float(text) for at, text in points if not math.isnan(float(text))}


def _differences(ours: Answer, theirs: Answer) -> list[str]:
    found = []
    for labels in ours.keys() | theirs.keys():
        left, right = ours.get(labels, {}), theirs.get(labels, {})
        for at in left.keys() | right.keys():
            one, other = left.get(at), right.get(at)
            if one is None or other is None or not _is_same(one, other):
                found.append(f"{labels} at {at}: {one} in Prometheus, {other} in VictoriaMetrics")
    return sorted(found)


def _is_same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=ROUNDING)


def comparable(text: str) -> str:
    """Return an expression of which the answer does not depend on the store.

    MetricsQL defines `rate` and `increase` in another way: they include the sample before the
    window, count a first value, and do not extrapolate. So the newest value stands for them. Which
    of equal series `topk` chooses is not defined, so it chooses all.
    """
    same = re.sub(r"\b(rate|increase)\(", "last_over_time(", text)
    return re.sub(r"\b(topk|bottomk)\(\d+", r"\1(1000", re.sub("> 10$", "> 0", same))


def _filled(text: str) -> str:
    own = text.replace("[$__rate_interval]", "[2m]").replace("$__range_s", "900")
    return filled_in(own, span="15m", compare="none")


def of_rules() -> Expressions:
    """Return the expressions of all rules."""
    return {
        f"{rule[kind]} {rule.get('labels', {})}": (comparable(rule["expr"]), False)
        for kind in ("record", "alert")
        for rule in rules(kind)
    }


def of_operands() -> Expressions:
    """Return the operands in the conditions of alerts, because most conditions are not met."""
    found = {
        str(operand)
        for rule in rules("alert")
        for node in nodes(promql_parser.parse(rule["expr"]))
        if isinstance(node, promql_parser.BinaryExpr)
        for operand in (node.lhs, node.rhs)
    }
    return {text: (comparable(text), False) for text in sorted(found)}


def of_boards() -> Expressions:
    """Return the queries of all boards, with everything selected."""
    ranges = {
        f"{name} {target['refId']}": bool(target["range"])
        for name, panel in PANELS.items()
        for target in panel["targets"]
    }
    return {
        name: (comparable(_filled(text)), ranges.get(name, True)) for name, text in QUERIES.items()
    }


def of_variables() -> Expressions:
    """Return the queries behind the lists of the boards' variables."""
    return {
        f"{name}: {variable['name']}": (comparable(_filled(_listed(variable["query"]))), False)
        for name, board in BOARDS.items()
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    }


def _listed(query: str) -> str:
    """Return the PromQL in a query of a variable, which names Grafana's own functions."""
    return re.sub(r"^label_values\((.*), \w+\)$|^query_result\((.*)\)$", r"\1\2", query)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """Both stores with three quarters of an hour of a fleet, and what the rules made of it."""
    skip_without("victoria-metrics")
    folder = tmp_path_factory.mktemp("stores")
    with prometheus(folder / "prometheus") as first, victoria_metrics(folder) as second:
        filled = Stores(first, second)
        record(History(first, second))
        get(f"{second}/internal/force_flush")
        until(lambda: not filled.differences("count by (job) ({__name__=~'.+'})", is_range=True))
        yield filled


@pytest.mark.stack
def test_both_stores_answer_alike(stores: Stores) -> None:
    """Each expression of rules and boards has the same series, with values that differ by 5%.

    Nine of ten have data; most conditions of alerts are not met, but their operands have data.
    """
    shown = {**of_boards(), **of_variables()}
    recorded = {name: each for name, each in of_rules().items() if ":" in name.partition(" ")[0]}

    found = stores.differing({**of_rules(), **of_operands(), **shown})

    assert not found, "\n".join(found)
    assert len(stores.without_data({**recorded, **shown})) < 0.1 * len({**recorded, **shown})


@pytest.mark.parametrize("function", ["changes", "delta", "idelta", "irate", "resets"])
def test_no_expression_has_a_function_with_two_definitions(function: str) -> None:
    """In VictoriaMetrics, these count from the sample before the window, or from a first one."""
    texts = [
        *QUERIES.values(),
        *(rule["expr"] for kind in ("record", "alert") for rule in rules(kind)),
    ]
    assert [text for text in texts if f"{function}(" in text] == []


def test_no_query_is_too_long() -> None:
    """VictoriaMetrics evaluates each of them, also where some runs and nodes are selected."""
    assert max(map(len, map(_filled, QUERIES.values()))) < 0.8 * MAX_QUERY_BYTES


@needs("vmalert")
def test_vmalert_accepts_all_rules() -> None:
    """An old vmalert, 1.79, loads each file as it is shipped."""
    command = ["vmalert", "-dryRun", *(f"-rule={path}" for path in RULES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
