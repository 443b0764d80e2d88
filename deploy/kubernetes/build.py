"""Write the generated manifests: the PrometheusRule from prometheus/rules, and the list of dashboards.

`python deploy/kubernetes/build.py` writes; with --check it only says which file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "prometheus" / "rules"
DASHBOARDS = ROOT / "dashboards" / "json"
NAMESPACE = "torchmem"
_HEADER = "# Written by deploy/kubernetes/build.py from {source}: change it there.\n"


class _Manifest(yaml.SafeDumper):
    """YAML as people write it: text of several lines stands as a block."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Manifest.add_representer(str, _text)


def main(argv: list[str] | None = None) -> int:
    """Return 0, or with --check 1 where a committed file differs from what would be written."""
    parser = argparse.ArgumentParser(description="Write the generated Kubernetes manifests.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a file is out of date"
    )
    check = parser.parse_args(argv).check
    stale = {
        path: text
        for path, text in rendered().items()
        if not path.exists() or path.read_text() != text
    }
    for path, text in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run make kubernetes.", file=sys.stderr)
        else:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


def rendered() -> dict[Path, str]:
    """The text of every generated file."""
    return {
        ROOT / "deploy/kubernetes/prometheus-operator/rules.yaml": _dump(
            _rules(), "prometheus/rules"
        ),
        DASHBOARDS / "kustomization.yaml": _dump(_dashboards(), "the files beside it"),
    }


def _rules() -> dict[str, Any]:
    groups = [
        group
        for file in sorted(RULES.glob("*.yml"))
        for group in yaml.safe_load(file.read_text())["groups"]
    ]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "torchmem",
            "namespace": NAMESPACE,
            "labels": {"app.kubernetes.io/part-of": "torchmem"},
        },
        "spec": {"groups": groups},
    }


def _dashboards() -> dict[str, Any]:
    """A component in the dashboards' own folder, for kustomize reads no file from outside of a component.

    One ConfigMap for each dashboard: together they could pass the 1 MiB that a ConfigMap may hold.
    """
    files = sorted(DASHBOARDS.glob("*.json"))
    return {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "generatorOptions": {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}},
        "configMapGenerator": [
            {
                "name": f"torchmem-dashboard-{file.stem}",
                "namespace": NAMESPACE,
                "files": [file.name],
            }
            for file in files
        ],
    }


def _dump(manifest: dict[str, Any], source: str) -> str:
    text = yaml.dump(manifest, Dumper=_Manifest, sort_keys=False, width=10**6, allow_unicode=True)
    return _HEADER.format(source=source) + text


if __name__ == "__main__":
    sys.exit(main())
