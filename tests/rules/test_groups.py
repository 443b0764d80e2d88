"""Which rules, alerts and panels calculate with values of different evaluations.

Prometheus evaluates each group of rules at its own time within the interval. A record of another
group is up to an interval old, and a difference between it and a series of now can be anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from promql_parser import BinaryExpr, NumberLiteral, VectorSelector, parse
from support import promql
from support.dashboards import QUERIES, filled_in

NOW = "now"
"""The evaluation itself: raw series, and what the same group has recorded just before."""
CONSTANTS = {
    "torchmem_device_total_bytes",
    "nvml_memory_total_bytes",
    "gpu:torchmem_memory_total_bytes:max",
    "torchmem_gpu_hour_price",
    "cluster:torchmem_gpu_hour_price:max",
}
"""The size of a device and its price do not change."""
SETS = {"and", "or", "unless"}
"""Operators that select series. A condition of another evaluation changes no value."""
PARTS = "torchmem_breakdown"

_PACE = "a pace or a mean of minutes: one evaluation more changes it little, and nothing adds up"
ALLOWED = {
    "rank:torchmem_peak_margin_exhaustion:seconds": (
        "margins of minutes ago, compared with a maximum of 10 minutes and a minimum of 2 days"
    ),
    "rank:torchmem_step_growth_seconds:left": _PACE,
    "run:torchmem_reserved_bytes:deviation": "a value compared with the median of a day",
    "run:torchmem_stranded_bytes:deviation": "a value compared with the median of a day",
    "run:torchmem_step_duration_seconds:deviation": "a value compared with the median of a day",
    "training-memory: Headroom F": _PACE,
    "training-memory: Headroom G": _PACE,
}
"""What may calculate with values of different evaluations, and why."""

RULES = [
    (group["name"], rule)
    for path in promql.RULES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
GROUPS = {rule["record"]: group for group, rule in RULES if "record" in rule}
EXPRESSIONS = [
    *((rule.get("record") or rule["alert"], group, rule["expr"]) for group, rule in RULES),
    *((name, "", filled_in(query)) for name, query in QUERIES.items()),
]


def _evaluations(node: Any, own: str) -> set[str]:
    """Return the groups, or NOW, whose evaluations a value depends on."""
    if isinstance(node, VectorSelector):
        return _of_series(node.name or "", own)
    children = promql.children(node)
    if isinstance(node, BinaryExpr):
        if _is_constant(node):
            return set()
        if _operator(node) in SETS - {"or"}:
            children = [node.lhs]
    return set().union(*(_evaluations(child, own) for child in children))


def _of_series(name: str, own: str) -> set[str]:
    if name in CONSTANTS or name.endswith(":info"):
        return set()
    group = GROUPS.get(name, NOW)
    return {NOW if group == own else group}


def _is_constant(node: BinaryExpr) -> bool:
    """Return whether a value is the same whatever its series is: 0 * x, x * 0 or x ^ 0."""
    sides = {"*": (node.lhs, node.rhs), "^": (node.rhs,)}.get(_operator(node), ())
    return any(isinstance(side, NumberLiteral) and side.val == 0 for side in sides)


def _operator(node: BinaryExpr) -> str:
    return str(node.op).split()[0]


def mixes(expression: str, own: str) -> Iterator[set[str]]:
    """Yield the evaluations of each calculation and comparison that mixes some."""
    for node in promql.nodes(parse(expression)):
        if isinstance(node, BinaryExpr) and _operator(node) not in SETS:
            evaluations = _evaluations(node, own)
            if len(evaluations) > 1:
                yield evaluations


def test_only_what_is_listed_calculates_with_values_of_different_evaluations() -> None:
    """Each rule, alert and panel that mixes evaluations is listed with its reason, and no other."""
    mixed = {name for name, group, expression in EXPRESSIONS if any(mixes(expression, group))}
    assert mixed == set(ALLOWED)


@pytest.mark.parametrize(
    "rule", [rule for group, rule in RULES if group == PARTS], ids=lambda rule: rule["record"]
)
def test_the_parts_of_a_device_come_from_one_evaluation(rule: dict[str, str]) -> None:
    """The group of the parts reads only raw series and its own records, also as conditions."""
    read = {name for name, _ in promql.selectors(rule["expr"])}
    assert {GROUPS.get(name, PARTS) for name in read} <= {PARTS}


@pytest.mark.parametrize(
    ("expression", "evaluations"),
    [
        ("nvml_memory_used_bytes - rank:torchmem_reserved_bytes:sum", {NOW, "torchmem_margins"}),
        (
            "rank:torchmem_reserved_bytes:sum > rank:torchmem_headroom_bytes:min5m",
            {"torchmem_trends", "torchmem_margins"},
        ),
        (
            "(nvml_memory_free_bytes or rank:torchmem_reserved_bytes:sum) + up",
            {NOW, "torchmem_margins"},
        ),
        ("nvml_memory_used_bytes - sum(gpu:torchmem_memory_bytes:sum)", None),
        ("nvml_memory_used_bytes and rank:torchmem_reserved_bytes:sum > 0", None),
        ("nvml_memory_used_bytes * rank:torchmem_reserved_bytes:sum ^ 0", None),
        ("rank:torchmem_reserved_bytes:sum / torchmem_device_total_bytes", None),
    ],
)
def test_a_mix_of_evaluations_is_detected(expression: str, evaluations: set[str] | None) -> None:
    """The check above finds differences and comparisons, also inside others, and no conditions."""
    assert next(mixes(expression, PARTS), None) == evaluations
