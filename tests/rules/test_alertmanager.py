"""Inhibitions, routing and message templates, tested with Alertmanager's own tools."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import promql
from support.stack import alertmanager, get, receiver
from support.waiting import until

CONFIGURATION = promql.ROOT / "alertmanager" / "alertmanager.yml"
NAMES = {rule["alert"] for rule in promql.rules("alert")}
RANK = {
    "job": "torchmem",
    "instance": "n:9847",
    "uuid": "GPU-a",
    "rank": "1",
    "pid": "7",
    "run": "gpt",
}
PROCESS = {name: RANK[name] for name in ("job", "instance", "rank", "pid", "run")}
CRITICAL, WARNING = {"severity": "critical"}, {"severity": "warning"}
OTHER = PROCESS | {"rank": "2", "pid": "8"}
GPU = {name: RANK[name] for name in ("job", "instance", "uuid")}
DATA: dict[str, Any] = {
    "status": "firing",
    "alerts": [
        {
            "status": status,
            "labels": {
                "alertname": "TorchmemRetryStorm",
                "severity": "warning",
                **RANK,
                "rank": rank,
            },
            "annotations": {
                "summary": f"gpt rank {rank}: the allocator flushes its cache 4.0 times a minute",
                "description": "Use a smaller batch.",
                "runbook_url": "http://127.0.0.1:9090/user/docs/runbooks/TorchmemRetryStorm.md",
                "dashboard_url": "/d/torchmem-training-memory?var-run=gpt",
            },
        }
        for rank, status in (("1", "firing"), ("2", "resolved"))
    ],
    "commonLabels": {"alertname": "TorchmemRetryStorm", "run": "gpt"},
}


def test_the_watchdog_has_a_receiver_of_its_own() -> None:
    """TorchmemWatchdog goes to `watchdog` only, often enough for a service that expects it."""
    configuration = yaml.safe_load(CONFIGURATION.read_text())
    first = configuration["route"]["routes"][0]
    assert first["matchers"] == ['alertname = "TorchmemWatchdog"']
    assert (first["receiver"], first["repeat_interval"]) == ("watchdog", "5m")
    assert "continue" not in first
    assert "watchdog" in {receiver["name"] for receiver in configuration["receivers"]}


def test_inhibitions_name_alerts_that_exist() -> None:
    """Every name and pattern in the routes and inhibitions matches at least one alert."""
    configuration = yaml.safe_load(CONFIGURATION.read_text())
    matchers = [
        matcher
        for rule in [*configuration["inhibit_rules"], *configuration["route"]["routes"]]
        for key in ("source_matchers", "target_matchers", "matchers")
        for matcher in rule.get(key, [])
        if "alertname" in matcher
    ]
    patterns = [re.findall(r'"(.+)"', matcher)[0] for matcher in matchers]

    assert patterns
    for pattern in patterns:
        for alternative in re.split(r"\|(?![^(]*\))", pattern):
            assert any(re.fullmatch(alternative, name) for name in NAMES), alternative


@pytest.mark.stack
@pytest.mark.parametrize(
    ("source", "target", "inhibited"),
    [
        (("TorchmemOutOfMemory", RANK | CRITICAL), ("TorchmemNearCapacity", RANK), True),
        (("TorchmemOutOfMemory", RANK | CRITICAL), ("TorchmemNearCapacity", OTHER), False),
        (("TorchmemOutOfMemory", RANK | CRITICAL), ("TorchmemMemoryLeak", RANK), False),
        (("TorchmemOutOfMemory", RANK | WARNING), ("TorchmemRankStalled", OTHER), False),
        (("TorchmemRankKilled", PROCESS | CRITICAL), ("TorchmemRankStalled", OTHER), True),
        (("TorchmemRankFailed", PROCESS | CRITICAL), ("TorchmemRankStalled", OTHER), True),
        (("TorchmemGpuLost", GPU), ("TorchmemRankKilled", PROCESS), True),
        (("TorchmemGpuLost", GPU), ("TorchmemRankFailed", PROCESS), True),
        (("TorchmemGpuLost", GPU), ("TorchmemGpuIdle", {**GPU, "uuid": "GPU-b"}), False),
        (("TorchmemExporterDown", {"instance": "n:9847"}), ("TorchmemGpuLost", GPU), True),
    ],
)
def test_an_alert_inhibits_its_consequences(
    source: tuple[str, dict[str, str]],
    target: tuple[str, dict[str, str]],
    inhibited: bool,
    tmp_path: Path,
) -> None:
    """Alertmanager suppresses the consequence of an alert, and nothing else."""
    alerts = [{"alertname": name, **labels} for name, labels in (source, target)]
    with receiver() as webhook, alertmanager(tmp_path, webhook.url) as address:
        body = json.dumps([{"labels": labels} for labels in alerts]).encode()
        request = urllib.request.Request(
            f"http://{address}/api/v2/alerts", body, {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).close()  # noqa: S310

        def sent() -> set[str]:
            return {alert["labels"]["alertname"] for alert in webhook.alerts}

        until(lambda: source[0] in sent())
        if not inhibited:
            until(lambda: target[0] in sent())
        state = {
            alert["labels"]["alertname"]: alert["status"]["state"] for alert in _alerts(address)
        }

    assert {
        source[0]: "active",
        target[0]: "suppressed" if inhibited else "active",
    } == state
    assert inhibited == (target[0] not in sent())


def _alerts(address: str) -> list[dict[str, Any]]:
    alerts: list[dict[str, Any]] = json.loads(get(f"http://{address}/api/v2/alerts"))
    return alerts


def _rendered(name: str, data: dict[str, Any], folder: Path) -> str:
    file = folder / "data.json"
    file.write_text(json.dumps(data))
    command = [
        "amtool",
        "template",
        "render",
        f"--template.glob={CONFIGURATION.parent}/templates/*.tmpl",
        f'--template.text={{{{ template "{name}" . }}}}',
        f"--template.data={file}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.stack
def test_a_message_is_readable_in_a_chat(tmp_path: Path) -> None:
    """The title has counts, the text each alert with remedy and links, and resolved alerts."""
    single = {**DATA, "alerts": DATA["alerts"][:1]}

    assert (
        _rendered("torchmem.title", single, tmp_path)
        == "gpt rank 1: the allocator flushes its cache 4.0 times a minute"
    )
    assert (
        _rendered("torchmem.title", DATA, tmp_path)
        == "TorchmemRetryStorm, run gpt: 1 firing, 1 resolved"
    )
    assert _rendered("torchmem.text", DATA, tmp_path) == (
        "- gpt rank 1: the allocator flushes its cache 4.0 times a minute\n"
        "  Use a smaller batch.\n"
        "  Runbook: http://127.0.0.1:9090/user/docs/runbooks/TorchmemRetryStorm.md\n"
        "  Dashboard: /d/torchmem-training-memory?var-run=gpt\n"
        "- Resolved: gpt rank 2: the allocator flushes its cache 4.0 times a minute"
    )


@pytest.mark.stack
def test_a_message_without_links_has_no_empty_lines_for_them(tmp_path: Path) -> None:
    """Rules for the Prometheus Operator may have no links."""
    alert = DATA["alerts"][0]
    texts = {name: text for name, text in alert["annotations"].items() if "_url" not in name}
    data = {**DATA, "alerts": [{**alert, "annotations": texts}]}

    assert _rendered("torchmem.text", data, tmp_path) == (
        "- gpt rank 1: the allocator flushes its cache 4.0 times a minute\n  Use a smaller batch."
    )


@pytest.mark.stack
def test_the_documented_route_takes_the_watchdogs(tmp_path: Path) -> None:
    """The runbook's configuration of kube-prometheus-stack routes both watchdogs, and no others."""
    page = (promql.ROOT / "docs" / "runbooks" / "TorchmemWatchdog.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    configuration = yaml.safe_load(block)["alertmanager"]["config"]
    configuration["route"]["routes"][0]["receiver"] = "service"
    configuration["receivers"].append({"name": "service"})
    file = tmp_path / "alertmanager.yml"
    file.write_text(yaml.safe_dump(configuration))

    assert [
        subprocess.check_output(
            ["amtool", "config", "routes", "test", f"--config.file={file}", f"alertname={name}"],
            text=True,
        ).strip()
        for name in ("TorchmemWatchdog", "Watchdog", "TorchmemGpuLost")
    ] == ["service", "service", "null"]
