"""`torchmem manifests`: write the configuration that a checkout contains, or make it from flags."""

from __future__ import annotations

import argparse
from importlib.metadata import distribution, version
from pathlib import Path

from torchmem.cli.parser import add_command
from torchmem.manifests import completion, dashboards, rules, shipped
from torchmem.sample.errors import UsageError

HELP = "write rules, dashboards, shell completion, and files for Kubernetes, systemd, …"
EPILOG = """\
rules, dashboards and completion have flags of their own. The files of the
other kinds have the same paths as in a checkout. Files that you changed are
replaced only with --force.

Examples:
  torchmem manifests kubernetes --out manifests
  torchmem manifests systemd --out manifests

`torchmem manifests KIND --help` shows the flags of a kind.
"""
# What the kinds of shipped files are.
SHIPPED = {
    "systemd": "the exporter as a service, its user and its run directory",
    "kubernetes": "kustomizations: the exporter, rules, dashboards, example jobs",
    "helm": "the same as a Helm chart",
    "mixin": "rules and dashboards as a monitoring mixin, for jsonnet",
    "slurm": "job scripts, a prolog and an epilog",
    "prometheus": "scrape configuration and rules",
    "scale": "several Prometheus servers and a store, for large fleets",
    "alertmanager": "routing and templates",
    "grafana": "dashboards and their provisioning",
    "compose": "Docker Compose: exporter, Prometheus, Alertmanager and Grafana",
    "image": "the exporter's container image",
    "stack": "the same as compose, from native binaries",
}
# Kinds with flags of their own.
MADE = {"rules": rules, "dashboards": dashboards, "completion": completion}
# What to do in the folder that was written.
NEXT = {
    "systemd": "The unit runs /opt/torchmem/bin/torchmem. Copy {out}/deploy/systemd/*.service to "
    "/etc/systemd/system, and the other folders' files to /etc/sysusers.d and /etc/tmpfiles.d.",
    "kubernetes": "Name your image in {out}/deploy/kubernetes/base/kustomization.yaml (newName, "
    "and newTag or digest), then run: kubectl apply -k {out}/deploy/kubernetes/base",
    "helm": "Install it with: helm install torchmem {out}/deploy/helm/torchmem "
    "--set image.repository=IMAGE --set-string image.tag=TAG",
    "mixin": "Add {out}/deploy/mixin/mixin.libsonnet to your mixins.",
    "slurm": "Start a job with: sbatch {out}/deploy/slurm/srun.sh",
    "prometheus": "List your nodes in {out}/prometheus/targets/exporters.yml, then run: "
    "promtool check config {out}/prometheus/prometheus.yml",
    "scale": "Name your store and nodes in {out}/deploy/scale and in "
    "{out}/prometheus/targets/exporters.yml; docs/scaling.md explains the files.",
    "alertmanager": "Set a receiver in {out}/alertmanager/alertmanager.yml, then run: "
    "amtool check-config {out}/alertmanager/alertmanager.yml",
    "grafana": "Start Grafana with GF_PATHS_PROVISIONING={out}/dashboards/provisioning, "
    "TORCHMEM_DASHBOARDS={out}/dashboards/json and PROMETHEUS_URL.",
    "compose": "Start it with: cd {out} && docker compose up -d",
    "image": "Build it with: "
    "docker build -f {out}/exporter/Dockerfile --build-arg VERSION={version} "
    "-t localhost/torchmem-exporter {out}",
    "stack": "Start it with: {out}/deploy/stack.sh",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the kinds, each with its flags."""
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
    for name, content in SHIPPED.items():
        _add_shipped_arguments(kinds.add_parser(name, help=content, description=content))
    for name, kind in MADE.items():
        add_command(kinds, name, kind)


def _add_shipped_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the kinds of shipped files."""
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", required=True, help="the directory to write to")
    add("--force", action="store_true", help="replace files that you changed")


def run(arguments: argparse.Namespace) -> int:
    """Write the shipped files of a kind, and print what to do next. Raises UsageError."""
    from torchmem.manifests import writing

    paths = shipped.paths(shipped.root(), arguments.kind)
    files = writing.read({path: path for path in paths})
    if arguments.kind in shipped.NEED_THE_WHEEL:
        files |= _wheel()
    replaced = writing.write(arguments.out, files, force=arguments.force)
    writing.keep_executable(arguments.out, paths)
    writing.report(arguments.out, len(files), replaced)
    print(NEXT[arguments.kind].format(out=arguments.out, version=version("torchmem")))
    return 0


def _wheel() -> dict[str, bytes]:
    from torchmem.manifests.wheel import rebuilt

    if folder := shipped.checkout():
        raise UsageError(
            f"torchmem runs from the checkout {folder}, which contains these files: use Docker "
            "there, or install torchmem without --editable."
        )
    return dict([rebuilt(distribution("torchmem"))])
