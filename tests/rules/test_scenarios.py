"""Every scenario of the simulator fires the alerts that docs/alerts.md promises, and no others."""

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
    "torchmem_memory", "torchmem_trends", "torchmem_runs", "torchmem_baselines", "torchmem_fleet",
    "torchmem_alerts_memory", "torchmem_alerts_ranks", "torchmem_alerts_gpus", "torchmem_alerts_monitoring",
]  # fmt: skip


def promised() -> dict[str, set[str]]:
    """Alerts by scenario, as the table of docs/alerts.md names them."""
    page = (ROOT / "docs" / "alerts.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", page, re.MULTILINE)
    return {
        name: set(re.findall(r"`(Torchmem\w+)`", alerts))
        for name, alerts in rows
        if name in SCENARIOS
    }


@pytest.fixture(scope="module")
def fired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What fires at any time of the hour, by scenario: Prometheus' own rule engine over all of them on one timeline."""
    series: Series = {}
    for name in SCENARIOS:
        series |= scrapes(name)
    question = {
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
                "tests": [
                    {"interval": "15s", "input_series": values, "promql_expr_test": [question]}
                ],
            }
        )
    )
    return _answers(file)


def _answers(file: Path) -> dict[str, set[str]]:
    """Promtool tells what it got when it expected nothing."""
    told = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    found: dict[str, set[str]] = {name: set() for name in SCENARIOS}
    for labels in re.findall(r'\{(alertname="[^}]*)\}', told.stdout + told.stderr):
        alert = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[alert["instance"].removesuffix(":9847")].add(alert["alertname"])
    assert any(found.values()), told.stdout + told.stderr
    return found


def test_the_table_has_every_scenario() -> None:
    """The table has one row for each scenario."""
    assert SCENARIOS.keys() == promised().keys()


@pytest.mark.stack
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_fires_what_the_table_promises(name: str, fired: dict[str, set[str]]) -> None:
    """Over an hour of training and what follows, exactly these alerts fire."""
    assert promised()[name] == fired[name]
