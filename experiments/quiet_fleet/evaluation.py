"""The shipped alerts over series, by Prometheus' own rule engine (`promtool test rules`)."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from rules.test_scenarios import GROUPS
from support.promql import ROOT, selectors

Rule = dict[str, Any]
HISTORY = "run:torchmem_peak_margin_bytes:min2d"
"""What earlier runs of a name left: of two days, so that it comes from `history`, not from a rule.
"""
ASKED_MINUTES = 60
"""What one query asks for: those of promtool's tests may load 10,000 samples."""
FIRING = 'ALERTS{alertstate="firing",severity!="none"}'


@dataclass(frozen=True, slots=True)
class Fired:
    """An alert with its labels: how often it began to fire, and first when, in minutes."""

    alert: str
    severity: str
    labels: tuple[tuple[str, str], ...]
    starts: int
    first: int

    @property
    def node(self) -> str:
        """The node; empty for an alert on a run."""
        return dict(self.labels).get("instance", "").partition(":")[0]

    @property
    def where(self) -> str:
        """The launch of the run, or the node."""
        labels = dict(self.labels)
        return labels.get("launch") or labels.get("instance", "")


def _groups() -> Iterator[dict[str, Any]]:
    for path in sorted((ROOT / "prometheus" / "rules").glob("*.yml")):
        yield from yaml.safe_load(path.read_text())["groups"]


def _read(rule: Rule) -> set[str]:
    return {name for name, _ in selectors(rule["expr"])}


@cache
def alerting_groups() -> list[dict[str, Any]]:
    """Return the alerts with the records that they read, in the order of evaluation."""
    alerts = [rule for group in _groups() for rule in group["rules"] if "alert" in rule]
    return groups_for(alerts)


def groups_for(wanted: Iterable[Rule]) -> list[dict[str, Any]]:
    """Return rules with the records that they read, in the order of evaluation."""
    groups = sorted(_groups(), key=lambda group: _place(group["name"]))
    records: dict[str, list[Rule]] = {}
    for rule in (rule for group in groups for rule in group["rules"] if "record" in rule):
        if rule["record"] != HISTORY:
            records.setdefault(rule["record"], []).append(rule)
    wanted = list(wanted)
    needed = set().union(*(_closure(rule, records) for rule in wanted)) & set(records)
    kept = []
    for group in groups:
        rules = [r for r in group["rules"] if r in wanted or r.get("record") in needed]
        if rules:
            kept.append({**group, "rules": rules})
    return kept


def _place(group: str) -> int:
    return GROUPS.index(group) if group in GROUPS else len(GROUPS)


def _closure(rule: Rule, records: dict[str, list[Rule]]) -> set[str]:
    """Return all metrics that a rule reads, also through others."""
    found: set[str] = set()
    todo = [rule]
    while todo:
        for name in _read(todo.pop()) - found:
            found.add(name)
            todo += records.get(name, [])
    return found


def for_minutes(alert: str, severity: str | None = None) -> float:
    """Return how long the condition of an alert must last; of several, that of the severity."""
    rules = (rule for group in _groups() for rule in group["rules"] if rule.get("alert") == alert)
    rule = next(r for r in rules if severity in (None, r["labels"]["severity"]))
    number = re.fullmatch(r"(\d+)([smh])", rule.get("for", "0s"))
    assert number
    return int(number[1]) * {"s": 1 / 60, "m": 1, "h": 60}[number[2]]


def metrics_read() -> frozenset[str]:
    """Return the metrics that the alerts read."""
    rules = (rule for group in alerting_groups() for rule in group["rules"])
    return frozenset(name for rule in rules for name in _read(rule)) | {"up"}


def fired(
    series: Iterable[tuple[str, str]],
    minutes: int,
    folder: Path,
    *,
    counted: int,
    step: int = 60,
) -> list[Fired]:
    """Return what fired in the last `counted` of some minutes of series.

    `step`: seconds between evaluations. The values are one per minute.
    """
    window = f"[{ASKED_MINUTES}m:{step}s]"
    queries = (
        f"count_over_time(({FIRING} unless {FIRING} offset {step}s){window})",
        f"min_over_time(timestamp({FIRING}){window})",
    )
    times = range(minutes - 1, minutes - 1 - counted, -ASKED_MINUTES)
    asked = [(query, time) for query in queries for time in times]
    return _parsed(answers(series, alerting_groups(), asked, folder, step))


def answers(
    series: Iterable[tuple[str, str]],
    groups: list[dict[str, Any]],
    asked: Iterable[tuple[str, int]],
    folder: Path,
    step: int,
) -> str:
    """Return what promtool prints for queries at some minutes, after groups were evaluated."""
    rules, tests = folder / "rules.json", folder / "tests.json"
    rules.write_text(json.dumps({"groups": groups}))
    test = {
        "interval": "60s",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {"expr": query, "eval_time": f"{time}m", "exp_samples": []} for query, time in asked
        ],
    }
    content = {
        "rule_files": [str(rules)],
        "evaluation_interval": f"{step}s",
        "group_eval_order": [group["name"] for group in groups],
        "tests": [test],
    }
    tests.write_text(json.dumps(content))
    command = ["promtool", "test", "rules", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if "SUCCESS" not in output and "got:" not in output:
        raise RuntimeError(output[:2000])
    tests.unlink()
    return output


SAMPLE = re.compile(r"\{([^{}]*)\} ([-+.eE\d]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


_Labels = tuple[tuple[str, str], ...]


def _parsed(output: str) -> list[Fired]:
    starts, first = Counter[_Labels](), dict[_Labels, float]()
    for answer in re.split(r"expr: ", output)[1:]:
        is_first = answer.lstrip('"').startswith("min_over_time")
        for text, value in SAMPLE.findall(answer.partition("got:")[2]):
            labels = tuple(each for each in _LABEL.findall(text) if each[0] != "__name__")
            if is_first:
                first[labels] = min(float(value), first.get(labels, math.inf))
            else:
                starts[labels] += round(float(value))
    return [_fired(labels, number, first[labels]) for labels, number in starts.items()]


def _fired(labels: _Labels, starts: int, first: float) -> Fired:
    known = dict(labels)
    hidden = ("alertname", "severity", "alertstate")
    rest = tuple(each for each in labels if each[0] not in hidden)
    return Fired(known["alertname"], known["severity"], rest, starts, int(first // 60))
