"""The monitoring mixin, evaluated by jsonnet."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.linked_rules import shipped_groups

from torchmem.cli.main import main

gojsonnet = pytest.importorskip("_gojsonnet", reason="jsonnet has no package for this platform")

ROOT = Path(__file__).resolve().parents[2]


def evaluated(expression: str, root: Path = ROOT) -> Any:
    """Evaluate an expression in which `mixin` is the mixin."""
    file = root / "deploy" / "mixin" / "mixin.libsonnet"
    return json.loads(
        gojsonnet.evaluate_snippet("test", f"local mixin = import '{file}'; {expression}")
    )


@pytest.mark.parametrize(
    ("field", "files"),
    [("prometheusAlerts", "alerts-*.yml"), ("prometheusRules", "recording-*.yml")],
)
def test_the_rules_are_those_of_prometheus(field: str, files: str) -> None:
    """The mixin has the groups of every rules file, alerts and recording rules apart.

    Links that its Prometheus does not serve are left out.
    """
    assert evaluated(f"mixin.{field}.groups") == shipped_groups(files)


def test_the_dashboards_are_those_of_grafana() -> None:
    """The mixin has every dashboard under the name of its file."""
    expected = {
        file.name: json.loads(file.read_text())
        for file in (ROOT / "dashboards" / "json").glob("*.json")
    }

    assert evaluated("mixin.grafanaDashboards") == expected


def test_links_with_a_url_stay(tmp_path: Path) -> None:
    """The rules that were written with the URLs of a Grafana and of runbooks keep their links."""
    thresholds = tmp_path / "thresholds.yml"
    thresholds.write_text("runbooks_at: https://docs.example.org/runbooks\n")
    assert main(["manifests", "mixin", "--out", str(tmp_path)]) == 0
    rules = ["manifests", "rules", "--thresholds", str(thresholds)]
    assert main([*rules, "--out", str(tmp_path / "prometheus" / "rules")]) == 0
    alerts = evaluated(
        "[rule.annotations for group in mixin.prometheusAlerts.groups for rule in group.rules]",
        tmp_path,
    )

    assert all(set(each) == {"summary", "description", "runbook_url"} for each in alerts)
    assert all(each["runbook_url"].startswith("https://docs.example.org/") for each in alerts)


def test_it_is_added_to_other_mixins() -> None:
    """Rules and dashboards of another mixin stay when this one is added."""
    alerts, boards = "groups+: [{name: 'other'}]", "'other.json': {}"
    other = f"{{prometheusAlerts+:: {{{alerts}}}, grafanaDashboards+:: {{{boards}}}}}"
    names = evaluated(f"[group.name for group in ({other} + mixin).prometheusAlerts.groups]")
    dashboards = evaluated(f"std.objectFieldsAll(({other} + mixin).grafanaDashboards)")

    assert "other" in names
    assert {"other.json", "fleet.json"} <= set(dashboards)


def test_the_documented_import_works(tmp_path: Path) -> None:
    """What `torchmem manifests mixin` writes is added to another mixin as docs/alerts.md shows."""
    vendor = tmp_path / "vendor"
    assert main(["manifests", "mixin", "--out", str(vendor / "torchmem")]) == 0
    (vendor / "kubernetes-mixin").mkdir()
    (vendor / "kubernetes-mixin" / "mixin.libsonnet").write_text("{grafanaDashboards:: {'a': 1}}")
    (shown,) = re.findall(
        r"```jsonnet\n(.*?)```", (ROOT / "docs" / "alerts.md").read_text(), re.DOTALL
    )
    boards = gojsonnet.evaluate_snippet(
        "test", f"std.objectFieldsAll(({shown}).grafanaDashboards)", [str(vendor)]
    )

    files = {path.name for path in (ROOT / "dashboards" / "json").glob("*.json")}
    assert set(json.loads(boards)) == {"a", *files}
