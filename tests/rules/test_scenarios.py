"""Every scenario of the simulator fires the alerts that docs/alerts.md lists, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import promtool
from support.promql import ROOT
from support.simulated_time import WATCHED_SECONDS, Series, promtool_values, scrapes

from torchmem.simulator.scenarios import SCENARIOS

GROUPS = [
    "torchmem_memory",
    "torchmem_breakdown",
    "torchmem_margins",
    "torchmem_trends",
    "torchmem_paces",
    "torchmem_history",
    "torchmem_prediction",
    "torchmem_runs",
    "torchmem_balance",
    "torchmem_baselines",
    "torchmem_gpus",
    "torchmem_nodes",
    "torchmem_fleet",
    "torchmem_report",
    "torchmem_alerts_memory",
    "torchmem_alerts_memory_slow",
    "torchmem_alerts_growth",
    "torchmem_alerts_ranks",
    "torchmem_alerts_ranks_slow",
    "torchmem_alerts_costs",
    "torchmem_alerts_serving",
    "torchmem_alerts_gpus",
    "torchmem_alerts_gpus_slow",
    "torchmem_alerts_monitoring",
]
FIRED = 'count_over_time(ALERTS{alertstate="firing",severity!="none"}[2h])'
OOMS = "sum by (run) (run:torchmem_ooms:increase1h)"


def documented_alerts() -> dict[str, set[str]]:
    """Return the alerts of each scenario from the table in docs/alerts.md."""
    page = (ROOT / "docs" / "alerts.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \|", page, re.MULTILINE)
    return {
        name: set(re.findall(r"`(Torchmem\w+)`", alerts))
        for name, alerts in rows
        if name in SCENARIOS
    }


def evaluated(
    series: Iterable[tuple[str, str]],
    expressions: list[str],
    folder: Path,
    seconds: float = WATCHED_SECONDS,
    interval: int = 15,
) -> str:
    """Return what Prometheus' rule engine prints for expressions after some seconds.

    `series` are names and values, one for each `interval` in seconds. promtool expects nothing and
    therefore prints the results.
    """
    end = f"{seconds:.0f}s"
    test = {
        "interval": f"{interval}s",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {"expr": expression, "eval_time": end, "exp_samples": []} for expression in expressions
        ],
    }
    file = folder / "scenarios.yml"
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
    result = promtool.run("test", "rules", file)
    return result.stdout + result.stderr


def test_the_table_has_every_scenario() -> None:
    """The table has one row for each scenario."""
    assert SCENARIOS.keys() == documented_alerts().keys()


@pytest.mark.stack
def test_scenarios_fire_the_documented_alerts(tmp_path: Path) -> None:
    """Exactly these alerts fire in an hour of training and ten minutes; each OOM is counted.

    One Prometheus watches all scenarios, each on a node of its own. The rule for the last hour
    counts the OOMs of running and of dead ranks.
    """
    by_scenario = {name: scrapes(name) for name in SCENARIOS}
    series = {name: values for each in by_scenario.values() for name, values in each.items()}

    values = ((name, promtool_values(points)) for name, points in series.items())
    output = evaluated(values, [FIRED, OOMS], tmp_path)

    fired = re.findall(r'\{alertname="(\w+)".*? instance="([\w-]+):9847"', output)
    assert documented_alerts() == {
        name: {alert for alert, node in fired if node == name} for name in SCENARIOS
    }
    assert len(fired) == output.count('{alertname="')
    counted = dict(re.findall(r'\{run="([\w-]+)"\} ([^\s,]+)', output))
    assert {name: ooms(each) for name, each in by_scenario.items()} == {
        name: float(counted.get(name, 0)) for name in SCENARIOS
    }


def ooms(series: Series) -> float:
    """Return the number of OOMs that the ranks of a scenario have published."""
    return sum(
        max(values.values())
        for name, values in series.items()
        if name.startswith("torchmem_ooms_total{")
    )
