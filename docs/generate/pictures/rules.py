"""The shipped rules, evaluated over a recorded past, as Prometheus would have done at that time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from docs.generate.pictures.history import History, with_stale_markers
from docs.generate.pictures.nodes import Labels

FOLDER = Path(__file__).resolve().parents[3] / "prometheus" / "rules"
_NAME = re.compile(r"[a-zA-Z_][\w:]*")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Rule:
    """A recording rule, or an alert that has to be true for `hold_seconds` before it fires."""

    name: str
    expr: str
    labels: Mapping[str, str]
    is_alert: bool
    hold_seconds: float = 0.0

    @property
    def reads(self) -> set[str]:
        """Return every name in the expression, those of series among them."""
        return set(_NAME.findall(self.expr))


def shipped() -> list[Rule]:
    """Return every rule after those that it reads."""
    rules = [
        _rule(entry)
        for path in sorted(FOLDER.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for entry in group["rules"]
    ]
    by_name = defaultdict[str, list[Rule]](list)
    for rule in rules:
        if not rule.is_alert:
            by_name[rule.name].append(rule)
    ordered: dict[int, Rule] = {}

    def visit(rule: Rule) -> None:
        if id(rule) in ordered:
            return
        for name in sorted(rule.reads & by_name.keys() - {rule.name}):
            for read in by_name[name]:
                visit(read)
        ordered[id(rule)] = rule

    for rule in rules:
        visit(rule)
    return list(ordered.values())


def evaluate(history: History, ticks: range) -> None:
    """Store the result of every rule at every tick, in milliseconds since 1970.

    Operands of `or` can differ in nothing but their names, which the result of a rule does not
    have: their points are one series.
    """
    for rule in shipped():
        start, end, step = ticks.start / 1000, ticks[-1] / 1000, ticks.step / 1000
        series: dict[Labels, dict[int, float]] = defaultdict(dict)
        for metric, points in history.query_range(rule.expr, start, end, step):
            labels = {**metric, **rule.labels}
            made = (
                alert_series(rule, labels, points, ticks)
                if rule.is_alert
                else [({**labels, "__name__": rule.name}, points)]
            )
            for own, values in made:
                series[_key(own)].update(values)
        for key, values in series.items():
            history.add(key, with_stale_markers(values, ticks))
        history.flush()


def alert_series(
    rule: Rule, labels: Mapping[str, str], points: Mapping[int, float], ticks: range
) -> Iterator[tuple[Mapping[str, str], Mapping[int, float]]]:
    """Yield the series ALERTS, pending and firing, and ALERTS_FOR_STATE."""
    own = {
        **{name: value for name, value in labels.items() if name != "__name__"},
        "alertname": rule.name,
    }
    since = _since(points, ticks)
    is_firing = {tick: tick - begun >= rule.hold_seconds * 1000 for tick, begun in since.items()}
    for state, wanted in (("pending", False), ("firing", True)):
        values = {tick: 1.0 for tick, firing in is_firing.items() if firing == wanted}
        if values:
            yield {**own, "__name__": "ALERTS", "alertstate": state}, values
    starts = {tick: begun / 1000 for tick, begun in since.items()}
    yield {**own, "__name__": "ALERTS_FOR_STATE"}, starts


def _since(points: Mapping[int, float], ticks: range) -> dict[int, int]:
    """Return for each tick with a value since which tick there was one at every tick."""
    since: dict[int, int] = {}
    for tick in ticks:
        if tick in points:
            since[tick] = since.get(tick - ticks.step, tick)
    return since


def _rule(entry: Mapping[str, object]) -> Rule:
    name = str(entry.get("record") or entry["alert"])
    labels = entry.get("labels") or {}
    assert isinstance(labels, dict)
    hold = _seconds(str(entry.get("for", "0s")))
    return Rule(name, str(entry["expr"]), labels, "alert" in entry, hold)


def _seconds(duration: str) -> float:
    return sum(
        int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", duration)
    )


def _key(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))
