"""The Helm chart, rendered by Helm's own engine, and the values that docs/kubernetes.md shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "torchmem"
# In C, which is ten times as fast for the rules and dashboards.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Values = Mapping[str, Any]
Manifest = dict[str, Any]

IMAGE: Values = {"repository": "registry.example.com/torchmem-exporter", "tag": "v1"}


def documented() -> dict[str, Values]:
    """Return the typical values of the page, by the start of the comment above them."""
    section = (ROOT / "docs" / "kubernetes.md").read_text().partition("## With kustomize")[0]
    blocks = re.findall(r"```yaml\n# ([^,:\n]+).*\n([^`]+)```", section)
    return {name: yaml.safe_load(text) for name, text in blocks}


def rendered(chart: Any, values: Values) -> dict[str, str]:
    """Return every file as Helm prints it; without an image in the values, of IMAGE."""
    files: dict[str, str] = chart.render(
        {"image": IMAGE, **values}, name="torchmem", namespace="monitoring"
    )
    return files


def manifests(chart: Any, values: Values) -> dict[str, list[Manifest]]:
    """Return the rendered manifests by kind."""
    found: dict[str, list[Manifest]] = {}
    for name, text in rendered(chart, values).items():
        for manifest in yaml.load_all(text, LOADER) if name.endswith(".yaml") else ():
            if manifest:
                found.setdefault(manifest["kind"], []).append(manifest)
    return found


def only(chart: Any, kind: str, values: Values) -> Manifest:
    """Return the only manifest of a kind."""
    (manifest,) = manifests(chart, values)[kind]
    return manifest


def pod(chart: Any, values: Values) -> Manifest:
    """Return the specification of the exporter's pods."""
    spec: Manifest = only(chart, "DaemonSet", values)["spec"]["template"]["spec"]
    return spec
