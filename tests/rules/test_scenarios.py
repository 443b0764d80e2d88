"""Every scenario of the simulator fires the alerts that docs/alerts.md lists, and no others."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.promql import ROOT
from support.simulated_time import WATCHED_SECONDS, Series, promtool_values, scrapes

from torchmem.simulator.scenarios import SCENARIOS

GROUPS = [
    "torchmem_memory",
    "torchmem_trends",
    "torchmem_history",
    "torchmem_prediction",
    "torchmem_runs",
    "torchmem_baselines",
    "torchmem_fleet",
    "torchmem_alerts_memory",
    "torchmem_alerts_ranks",
    "torchmem_alerts_gpus",
    "torchmem_alerts_monitoring",
]
FIRED = 'count_over_time(ALERTS{alertstate="firing",severity!="none"}[2h])'
OOMS = "sum(run:torchmem_ooms:increase1h) or vector(0)"


def documented_alerts() -> dict[str, set[str]]:
    """Return the alerts of each scenario from the table in docs/alerts.md."""
    page = (ROOT / "docs" / "alerts.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", page, re.MULTILINE)
    return {
        name: set(re.findall(r"`(Torchmem\w+)`", alerts))
        for name, alerts in rows
        if name in SCENARIOS
    }


def evaluated(series: Series, expressions: list[str], folder: Path) -> str:
    """Return what Prometheus' rule engine prints for expressions at the end of a scenario.

    promtool expects nothing and therefore prints the results.
    """
    end = f"{WATCHED_SECONDS:.0f}s"
    test = {
        "interval": "15s",
        "input_series": [
            {"series": name, "values": promtool_values(points)} for name, points in series.items()
        ],
        "promql_expr_test": [
            {"expr": expression, "eval_time": end, "exp_samples": []} for expression in expressions
        ],
    }
    file = folder / "scenario.yml"
    file.write_text(
        json.dumps(
            {
                "rule_files": [str(ROOT / "prometheus" / "rules" / "*.yml")],
                "evaluation_interval": "30s",
                "group_eval_order": GROUPS,
                "tests": [test],
            }
        )
    )
    result = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    return result.stdout + result.stderr


def test_the_table_has_every_scenario() -> None:
    """The table has one row for each scenario."""
    assert SCENARIOS.keys() == documented_alerts().keys()


@pytest.mark.stack
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_fires_the_documented_alerts(name: str, tmp_path: Path) -> None:
    """Exactly these alerts fire in an hour of training and ten minutes; each OOM is counted.

    The rule for the last hour counts the OOMs of running and of dead ranks.
    """
    series = scrapes(name)
    counters = [
        max(values.values())
        for each, values in series.items()
        if each.startswith("torchmem_ooms_total{")
    ]

    output = evaluated(series, [FIRED, OOMS], tmp_path)

    assert documented_alerts()[name] == set(re.findall(r'\{alertname="(\w+)"', output)), output
    (counted,) = re.findall(r"got: \{\} (\S+)", output)
    assert sum(counters) == float(counted)
