"""The same alerts by Prometheus' own rule engine, to prove the evaluation in `promql`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from experiments.prediction.promql import Evaluation
from experiments.prediction.recordings import SCRAPE_SECONDS, Labels, Recording, Values
from experiments.prediction.yardstick import Rule, firing
from support.promql import selectors

INTERVAL = f"{SCRAPE_SECONDS:g}s"
ALERT = "Fires"


def compare(rule: Rule, recording: Recording) -> str:
    """Return what promtool says of a rule that should fire as evaluated, at each scrape."""
    fires = firing(rule, Evaluation(recording.series, recording.scrapes))
    count = sum(int(when.sum()) for when in fires.values())
    problem = disagreement(rule, recording, fires)
    return problem or f"equal at {recording.scrapes} scrapes, firing at {count}"


def disagreement(
    rule: Rule, recording: Recording, fires: Mapping[Labels, npt.NDArray[np.bool_]]
) -> str:
    """Return an empty string if promtool fires the alert at exactly these scrapes.

    Otherwise return what promtool prints.
    """
    checks = [
        {
            "eval_time": f"{number * SCRAPE_SECONDS:g}s",
            "alertname": ALERT,
            "exp_alerts": [
                {"exp_labels": dict(labels)} for labels, when in fires.items() if when[number]
            ],
        }
        for number in range(recording.scrapes)
    ]
    test = {
        "interval": INTERVAL,
        "input_series": _input(rule, recording),
        "alert_rule_test": checks,
    }
    with tempfile.TemporaryDirectory() as folder:
        rules, tests = Path(folder) / "rules.yml", Path(folder) / "tests.yml"
        groups = _groups(rule)
        rules.write_text(json.dumps({"groups": groups}))
        names = [group["name"] for group in groups]
        tests.write_text(
            json.dumps(
                {
                    "rule_files": [str(rules)],
                    "evaluation_interval": INTERVAL,
                    "group_eval_order": names,
                    "tests": [test],
                }
            )
        )
        command = ["promtool", "test", "rules", str(tests)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def _groups(rule: Rule) -> list[dict[str, Any]]:
    """Return the rules in groups of one interval each, in their order."""
    by_interval = groupby(_rules(rule), lambda each: each.pop("interval_seconds", SCRAPE_SECONDS))
    return [
        {"name": f"prediction {number}", "interval": f"{interval:g}s", "rules": list(rules)}
        for number, (interval, rules) in enumerate(by_interval)
    ]


def _rules(rule: Rule) -> list[dict[str, Any]]:
    keys = ("record", "expr", "labels", "interval_seconds")
    records = [{key: record[key] for key in keys if key in record} for record in rule.records]
    kept = {"keep_firing_for": f"{rule.keep_seconds:g}s"} if rule.keep_seconds else {}
    return [*records, {"alert": ALERT, "expr": rule.alert, "for": f"{rule.for_seconds:g}s"} | kept]


def _input(rule: Rule, recording: Recording) -> list[dict[str, str]]:
    """Return the scraped series that a rule reads, in promtool's notation."""
    read = {name for each in _rules(rule) for name, _ in selectors(each["expr"])}
    return [
        {"series": _series(name, labels), "values": _values(values)}
        for name, vector in recording.series.items()
        if name in read
        for labels, values in vector.items()
    ]


def _series(name: str, labels: Labels) -> str:
    written = ",".join(f'{label}="{value}"' for label, value in sorted(labels))
    return f"{name}{{{written}}}"


def _values(values: Values) -> str:
    return " ".join("stale" if np.isnan(value) else f"{value:.17g}" for value in values)
