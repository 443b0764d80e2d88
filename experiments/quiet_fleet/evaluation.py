"""The shipped alerts over series, by Prometheus' own rule engine (`promtool test rules`)."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from rules.test_scenarios import GROUPS
from support.promql import ROOT, selectors

Rule = dict[str, Any]
SLOW_RECORD = "gpu:torchmem_memory_bytes:sum"
"""Of what memory consists: 31 rules, which only alerts that hold for minutes read."""
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
    def where(self) -> str:
        """What Alertmanager groups alerts by: the run, or the node."""
        labels = dict(self.labels)
        return labels.get("run") or labels.get("instance", "")


def _groups() -> Iterator[dict[str, Any]]:
    for path in sorted((ROOT / "prometheus" / "rules").glob("*.yml")):
        yield from yaml.safe_load(path.read_text())["groups"]


def _read(rule: Rule) -> set[str]:
    return {name for name, _ in selectors(rule["expr"])}


@cache
def alerting_groups(*, slow: bool) -> list[dict[str, Any]]:
    """Return the alerts with what they read, in the order of evaluation.

    `slow`: those that read of what memory consists; otherwise all others.
    """
    groups = sorted(_groups(), key=lambda group: _place(group["name"]))
    records: dict[str, list[Rule]] = {}
    for rule in (rule for group in groups for rule in group["rules"] if "record" in rule):
        records.setdefault(rule["record"], []).append(rule)
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    wanted = [a for a in alerts if (SLOW_RECORD in _closure(a, records)) == slow]
    needed = set().union(*(_closure(alert, records) for alert in wanted))
    kept = []
    for group in groups:
        rules = [r for r in group["rules"] if r.get("record") in needed or r in wanted]
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


def metrics_read(*, slow: bool) -> frozenset[str]:
    """Return the metrics that the alerts read."""
    rules = (rule for group in alerting_groups(slow=slow) for rule in group["rules"])
    return frozenset(name for rule in rules for name in _read(rule)) | {"up"}


def fired(
    series: Iterable[tuple[str, str]],
    minutes: int,
    folder: Path,
    *,
    slow: bool,
    counted: int,
    step: int = 60,
    groups: Sequence[dict[str, Any]] | None = None,
) -> list[Fired]:
    """Return what fired in the last `counted` of some minutes of series.

    `step`: seconds between evaluations. The values are one per minute.
    """
    rules, tests = folder / "rules.json", folder / "tests.json"
    chosen = groups or alerting_groups(slow=slow)
    rules.write_text(json.dumps({"groups": chosen}))
    window = f"[{counted}m:{step}s]"
    queries = (
        f"count_over_time(({FIRING} unless {FIRING} offset {step}s){window})",
        f"min_over_time(timestamp({FIRING}){window})",
    )
    test = {
        "interval": "60s",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {"expr": query, "eval_time": f"{minutes - 1}m", "exp_samples": []} for query in queries
        ],
    }
    content = {
        "rule_files": [str(rules)],
        "evaluation_interval": f"{step}s",
        "group_eval_order": [group["name"] for group in chosen],
        "tests": [test],
    }
    tests.write_text(json.dumps(content))
    command = ["promtool", "test", "rules", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if "SUCCESS" not in output and "got:" not in output:
        raise RuntimeError(output[:2000])
    tests.unlink()
    return _parsed(output)


_SAMPLE = re.compile(r"\{([^{}]*)\} ([-+.eE\d]+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _parsed(output: str) -> list[Fired]:
    answers = re.split(r"expr: ", output)[1:]
    found: list[dict[tuple[tuple[str, str], ...], float]] = [{}, {}]
    for answer in answers:
        into = found[answer.lstrip('"').startswith("min_over_time")]
        for labels, value in _SAMPLE.findall(answer.partition("got:")[2]):
            into[tuple(_LABEL.findall(labels))] = float(value)
    return [_fired(labels, starts, found[1]) for labels, starts in found[0].items()]


def _fired(
    labels: tuple[tuple[str, str], ...],
    starts: float,
    first: dict[tuple[tuple[str, str], ...], float],
) -> Fired:
    known = dict(labels)
    rest = tuple(each for each in labels if each[0] not in ("alertname", "severity", "alertstate"))
    without_name = tuple(each for each in labels if each[0] != "__name__")
    return Fired(
        known["alertname"],
        known["severity"],
        rest,
        int(starts),
        int(first.get(labels, first.get(without_name, 0.0)) // 60),
    )
