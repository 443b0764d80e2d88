"""What reaches a person: inhibitions, routing and the words of a message, by Alertmanager's own tools."""

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
                "runbook_url": "docs/runbooks/TorchmemRetryStorm.md",
                "dashboard_url": "/d/torchmem-training-memory?var-run=gpt",
            },
        }
        for rank, status in (("1", "firing"), ("2", "resolved"))
    ],
    "commonLabels": {"alertname": "TorchmemRetryStorm", "run": "gpt"},
}


def test_inhibitions_name_alerts_that_exist() -> None:
    """Every name and expression in the routes and inhibitions matches at least one alert."""
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
    ("source", "target", "held_back"),
    [
        ({"alertname": "TorchmemOutOfMemory", **RANK}, {"alertname": "TorchmemNearCapacity", **RANK}, True),
        ({"alertname": "TorchmemOutOfMemory", **RANK}, {"alertname": "TorchmemNearCapacity", **OTHER}, False),
        ({"alertname": "TorchmemOutOfMemory", **RANK}, {"alertname": "TorchmemMemoryLeak", **RANK}, False),
        ({"alertname": "TorchmemRankKilled", **PROCESS}, {"alertname": "TorchmemRankStalled", **OTHER}, True),
        ({"alertname": "TorchmemGpuLost", **GPU}, {"alertname": "TorchmemRankKilled", **PROCESS}, True),
        ({"alertname": "TorchmemGpuLost", **GPU}, {"alertname": "TorchmemGpuIdle", **GPU, "uuid": "GPU-b"}, False),
        ({"alertname": "TorchmemExporterDown", "instance": "n:9847"}, {"alertname": "TorchmemGpuLost", **GPU}, True),
    ],
)  # fmt: skip
def test_what_explains_another_alert_holds_it_back(
    source: dict[str, str], target: dict[str, str], held_back: bool, tmp_path: Path
) -> None:
    """The real Alertmanager suppresses the consequence, and only that."""
    with receiver() as webhook, alertmanager(tmp_path, webhook.url) as address:
        body = json.dumps([{"labels": labels} for labels in (source, target)]).encode()
        request = urllib.request.Request(
            f"http://{address}/api/v2/alerts", body, {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).close()  # noqa: S310

        def sent() -> set[str]:
            return {alert["labels"]["alertname"] for alert in webhook.alerts}

        until(lambda: source["alertname"] in sent())
        if not held_back:
            until(lambda: target["alertname"] in sent())
        state = {
            alert["labels"]["alertname"]: alert["status"]["state"] for alert in _alerts(address)
        }

    assert {
        source["alertname"]: "active",
        target["alertname"]: "suppressed" if held_back else "active",
    } == state
    assert held_back == (target["alertname"] not in sent())


def _alerts(address: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(get(f"http://{address}/api/v2/alerts"))
    return found


def _rendered(name: str, data: dict[str, Any], folder: Path) -> str:
    file = folder / "data.json"
    file.write_text(json.dumps(data))
    command = ["amtool", "template", "render", f"--template.glob={CONFIGURATION.parent}/templates/*.tmpl",
               f'--template.text={{{{ template "{name}" . }}}}', f"--template.data={file}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.stack
def test_a_message_reads_well_in_a_chat(tmp_path: Path) -> None:
    """The title counts, the text gives each alert with its remedy and links, and what is over in one line."""
    one = {**DATA, "alerts": DATA["alerts"][:1]}

    assert "gpt rank 1: the allocator flushes its cache 4.0 times a minute" == _rendered(
        "torchmem.title", one, tmp_path
    )
    assert "TorchmemRetryStorm, run gpt: 1 firing, 1 over" == _rendered(
        "torchmem.title", DATA, tmp_path
    )
    assert (
        "- gpt rank 1: the allocator flushes its cache 4.0 times a minute\n"
        "  Use a smaller batch.\n"
        "  Runbook: docs/runbooks/TorchmemRetryStorm.md\n"
        "  Dashboard: /d/torchmem-training-memory?var-run=gpt\n"
        "- Over: gpt rank 2: the allocator flushes its cache 4.0 times a minute"
    ) == _rendered("torchmem.text", DATA, tmp_path)
