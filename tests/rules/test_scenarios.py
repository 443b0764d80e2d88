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


@pytest.fixture(scope="module")
def fired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Alerts that fire in each scenario; Prometheus' rule engine evaluates all at once."""
    series: Series = {}
    for name in SCENARIOS:
        series |= scrapes(name)
    query = {
        "expr": 'count_over_time(ALERTS{alertstate="firing"}[2h])',
        "eval_time": f"{WATCHED_SECONDS:.0f}s",
        "exp_samples": [],
    }
    values = [
        {"series": name, "values": promtool_values(points)} for name, points in series.items()
    ]
    file = tmp_path_factory.mktemp("scenarios") / "scenarios.yml"
    file.write_text(
        json.dumps(
            {
                "rule_files": [str(ROOT / "prometheus" / "rules" / "*.yml")],
                "evaluation_interval": "30s",
                "group_eval_order": GROUPS,
                "tests": [{"interval": "15s", "input_series": values, "promql_expr_test": [query]}],
            }
        )
    )
    return _firing_alerts(file)


def _firing_alerts(file: Path) -> dict[str, set[str]]:
    """Return the alerts from the message of promtool, which expected none."""
    result = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    alerts: dict[str, set[str]] = {name: set() for name in SCENARIOS}
    for labels in re.findall(r'\{(alertname="[^}]*)\}', result.stdout + result.stderr):
        alert = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        alerts[alert["instance"].removesuffix(":9847")].add(alert["alertname"])
    assert any(alerts.values()), result.stdout + result.stderr
    return alerts


def test_the_table_has_every_scenario() -> None:
    """The table has one row for each scenario."""
    assert SCENARIOS.keys() == documented_alerts().keys()


@pytest.mark.stack
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_fires_the_documented_alerts(name: str, fired: dict[str, set[str]]) -> None:
    """Exactly these alerts fire during an hour of training and ten minutes afterwards."""
    assert documented_alerts()[name] == fired[name]
