"""The rules use existing series, follow naming conventions, and pass Prometheus' own tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from support import promql, promtool

ALERTS = promql.rules("alert")
RECORDED = promql.rules("record")


@pytest.mark.parametrize(
    "rule", RECORDED + ALERTS, ids=lambda rule: rule.get("record") or rule["alert"]
)
def test_a_rule_reads_only_series_and_labels_that_exist(rule: dict[str, str]) -> None:
    """Every metric and label of every rule is in the catalog or recorded by an earlier rule."""
    assert promql.problems(rule["expr"]) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("torchmem_reserved_byte", "no series torchmem_reserved_byte"),
        ('torchmem_free_bytes{pool="small"}', "torchmem_free_bytes has no label pool"),
        ("sum by (le) (torchmem_free_bytes)", "nothing here has a label le"),
        ("up and on (rank) up", "nothing here has a label rank"),
    ],
)
def test_a_misspelled_name_is_detected(expression: str, problem: str) -> None:
    """The check above detects wrong metrics, matchers, groupings and joins."""
    assert promql.problems(expression) == [problem]


# What OpenCost reads has OpenCost's name.
NAMED_BY_OTHERS = {"node_gpu_hourly_cost"}


@pytest.mark.parametrize("name", sorted({rule["record"] for rule in RECORDED} - NAMED_BY_OTHERS))
def test_recording_rules_are_named_level_metric_operations(name: str) -> None:
    """Names have the form `level:metric:operations`; the level is what one series describes."""
    assert re.fullmatch(
        r"(rank|gpu|run|pod|user|process|instance|cluster):(torchmem|nvml)_[a-z_]+:[a-z0-9]+", name
    ), name


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_is_complete(alert: dict[str, dict[str, str]], root: Path) -> None:
    """Severity, summary, description and links are set, and the runbook exists."""
    assert re.fullmatch(r"Torchmem([A-Z][a-z]+)+", str(alert["alert"]))
    assert alert["labels"]["severity"] in {"critical", "warning", "info", "none"}
    annotations = alert["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url", "dashboard_url"}
    served, page = annotations["runbook_url"].split("/user/")
    assert (served, page) == ("{{ $externalURL }}", f"docs/runbooks/{alert['alert']}.md")
    assert (root / page).read_text().startswith(f"# {alert['alert']}\n")


def test_dashboard_links_of_alerts_are_valid(root: Path) -> None:
    """Each dashboard_url names a shipped dashboard and variables that it has."""
    shipped = {
        dashboard["uid"]: {variable["name"] for variable in dashboard["templating"]["list"]}
        for dashboard in (
            json.loads(path.read_text()) for path in (root / "dashboards" / "json").glob("*.json")
        )
    }
    for alert in ALERTS:
        uid = re.match(r"/d/([\w-]+)", alert["annotations"]["dashboard_url"])
        assert uid is not None
        assert uid[1] in shipped, alert["alert"]
        assert (
            set(re.findall(r"var-(\w+)=", alert["annotations"]["dashboard_url"])) <= shipped[uid[1]]
        ), alert["alert"]


def test_every_alert_has_its_unit_tests(root: Path) -> None:
    """For each alert, one promtool test expects it to fire and another one expects silence.

    TorchmemWatchdog always fires.
    """
    outcomes: dict[str, set[bool]] = {alert["alert"]: set() for alert in ALERTS}
    for path in (root / "prometheus" / "tests").glob("*.yml"):
        for test in yaml.safe_load(path.read_text())["tests"]:
            for check in test.get("alert_rule_test", []):
                outcomes[check["alertname"]].add(bool(check["exp_alerts"]))
    assert outcomes.pop("TorchmemWatchdog") == {True}
    assert {alert: {True, False} for alert in outcomes} == outcomes


@pytest.mark.stack
@pytest.mark.parametrize(
    "command",
    [
        ["promtool", "check", "config", "prometheus/prometheus.yml"],
        ["promtool", "check", "rules", *(str(path) for path in promql.RULES)],
        ["amtool", "check-config", "alertmanager/alertmanager.yml"],
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_the_tools_accept_the_configuration(command: list[str], root: Path) -> None:
    """Prometheus and Alertmanager can load the shipped files."""
    checked = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.stack
@pytest.mark.parametrize(
    "path",
    sorted((promql.ROOT / "prometheus" / "tests").glob("*.yml")),
    ids=lambda path: path.stem,
)
def test_the_rules_pass_their_unit_tests(path: Path) -> None:
    """The promtool tests pass: alerts fire exactly when expected, and parts of a device add up."""
    # Almost no garbage collection saves a sixth of the CPU time.
    environment = {**os.environ, "GOGC": "off", "GOMEMLIMIT": "1GiB"}
    promtool.accepts("test", "rules", path, env=environment)
