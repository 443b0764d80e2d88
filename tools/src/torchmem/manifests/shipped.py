"""The configuration files that torchmem ships: which ones there are, and where to read them.

hatch_build.py runs this file to put them into the wheel, so it imports only the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

# Paths in the checkout, by kind. Files keep their paths, so that references between them work.
_GRAFANA = ("dashboards/json", "dashboards/provisioning")
_PROMETHEUS = ("prometheus/prometheus.yml", "prometheus/rules", "prometheus/targets")
_ALERTMANAGER = ("alertmanager/alertmanager.yml", "alertmanager/templates")
_IMAGE = (
    ".dockerignore",
    "exporter/Dockerfile",
    "exporter/build-requirements.txt",
    "exporter/requirements.txt",
)
# Prometheus serves the runbooks, to which the alerts link.
_STACK = (*_PROMETHEUS, *_ALERTMANAGER, *_GRAFANA, "docker-compose.yml", "docs/runbooks")
KINDS: Mapping[str, tuple[str, ...]] = {
    "systemd": ("deploy/systemd", "deploy/sysusers.d", "deploy/tmpfiles.d"),
    "kubernetes": (
        "deploy/kubernetes/base",
        "deploy/kubernetes/examples",
        "deploy/kubernetes/network-policy",
        "deploy/kubernetes/overlays",
        "deploy/kubernetes/pod-names",
        "deploy/kubernetes/prometheus-operator",
        "dashboards/json",
    ),
    "helm": ("deploy/helm/torchmem",),
    "mixin": ("deploy/mixin", "prometheus/rules", "dashboards/json"),
    "slurm": ("deploy/slurm",),
    "prometheus": _PROMETHEUS,
    "scale": ("deploy/scale", "prometheus/rules", "prometheus/targets"),
    "alertmanager": _ALERTMANAGER,
    "grafana": _GRAFANA,
    "image": _IMAGE,
    "compose": (*_STACK, *_IMAGE, "docker-compose.gpu.yml", "prometheus/targets-compose"),
    "stack": (*_STACK, "deploy/stack.sh"),
}
# The build context of the image also needs torchmem itself.
NEED_THE_WHEEL = frozenset({"image", "compose"})
# Where they are in the wheel.
BUNDLE = "torchmem/manifests/files"


def paths(root: Path, *kinds: str) -> list[str]:
    """Return the paths, below a checkout or bundle, of the files of these kinds.

    Raises FileNotFoundError if one is missing.
    """
    entries = {entry for kind in kinds for entry in KINDS[kind]}
    return sorted({path for entry in entries for path in _files(root, entry)})


def checkout() -> Path | None:
    """Return the checkout from which torchmem is imported, or None if it is installed."""
    return None if _bundle().is_dir() else Path(__file__).parents[4]


def root() -> Path:
    """Return the folder of the shipped files."""
    return checkout() or _bundle()


def _bundle() -> Path:
    return Path(__file__).with_name(Path(BUNDLE).name)


def _files(root: Path, entry: str) -> Iterator[str]:
    path = root / entry
    if not path.exists():
        raise FileNotFoundError(path)
    if path.is_file():
        yield entry
    # The chart has links to the dashboards and thresholds.
    for folder, _, names in os.walk(path, followlinks=True):
        yield from (Path(folder, name).relative_to(root).as_posix() for name in names)
