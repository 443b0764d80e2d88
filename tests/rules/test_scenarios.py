"""Every scenario of the simulator fires the alerts that docs/alerts.md lists, and no others."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.promql import ROOT
from support.simulated_time import WATCHED_SECONDS, promtool_values, scrapes

from torchmem.simulator.scenarios import SCENARIOS

GROUPS = [
    "torchmem_memory",
    "torchmem_trends",
    "torchmem_runs",
    "torchmem_baselines",
    "torchmem_fleet",
    "torchmem_alerts_memory",
    "torchmem_alerts_ranks",
    "torchmem_alerts_gpus",
    "torchmem_alerts_monitoring",
]


def documented_alerts() -> dict[str, set[str]]:
    """Return the alerts of each scenario from the table in docs/alerts.md."""
    page = (ROOT / "docs" / "alerts.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", page, re.MULTILINE)
    return {
        name: set(re.findall(r"`(Torchmem\w+)`", alerts))
        for name, alerts in rows
        if name in SCENARIOS
    }


def evaluated(name: str, expression: str, folder: Path) -> str:
    """Return what Prometheus' rule engine prints for an expression at the end of a scenario.

    promtool expects nothing and therefore prints the result.
    """
    query = {"expr": expression, "eval_time": f"{WATCHED_SECONDS:.0f}s", "exp_samples": []}
    series = [
        {"series": series, "values": promtool_values(points)}
        for series, points in scrapes(name).items()
    ]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": [query]}
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


def firing_alerts(name: str, folder: Path) -> set[str]:
    """Return the alerts that fire at any time in a scenario."""
    output = evaluated(
        name, 'count_over_time(ALERTS{alertstate="firing",severity!="none"}[2h])', folder
    )
    alerts = set(re.findall(r'\{alertname="(\w+)"', output))
    assert ("SUCCESS" in output) == (not alerts), output
    return alerts


def test_the_table_has_every_scenario() -> None:
    """The table has one row for each scenario."""
    assert SCENARIOS.keys() == documented_alerts().keys()


@pytest.mark.stack
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_fires_the_documented_alerts(name: str, tmp_path: Path) -> None:
    """Exactly these alerts fire during an hour of training and ten minutes afterwards."""
    assert documented_alerts()[name] == firing_alerts(name, tmp_path)


@pytest.mark.stack
@pytest.mark.parametrize("name", ["fragmentation", "imbalanced-ranks", "healthy-slack"])
def test_the_ooms_of_the_last_hour_are_those_of_the_ranks(name: str, tmp_path: Path) -> None:
    """The rule for the last hour counts each OOM of the scenario, in running and in dead ranks."""
    counters = [
        max(values.values())
        for series, values in scrapes(name).items()
        if series.startswith("torchmem_ooms_total{")
    ]

    output = evaluated(name, "sum(run:torchmem_ooms:increase1h) or vector(0)", tmp_path)

    (counted,) = re.findall(r"got: \{\} (\S+)", output)
    assert sum(counters) == float(counted)
