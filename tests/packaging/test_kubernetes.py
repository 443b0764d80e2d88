"""deploy/kubernetes: the manifests fit together, are valid, and ask for no more than they say."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
BASE, OVERLAY = FOLDER / "base", FOLDER / "overlays" / "gpu-operator"
KUSTOMIZE = next(
    (c for c in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(c[0])), None
)
Manifest = dict[str, Any]


def manifests(path: Path) -> list[Manifest]:
    """Every document of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def one(path: Path, kind: str) -> Manifest:
    """The document of that kind."""
    (found,) = [manifest for manifest in manifests(path) if manifest["kind"] == kind]
    return found


DAEMONSET = one(BASE / "daemonset.yaml", "DaemonSet")
POD: dict[str, Any] = DAEMONSET["spec"]["template"]["spec"]
(EXPORTER,) = POD["containers"]
(RUN_DIR,) = POD["initContainers"]


def kustomizations(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """The folder's kustomization and all that it refers to."""
    found = manifests(folder / "kustomization.yaml")[0]
    yield folder, found
    for other in [*found.get("resources", []), *found.get("components", [])]:
        if (folder / other).is_dir():
            yield from kustomizations(folder / other)


def test_the_rules_are_those_of_prometheus() -> None:
    """Every group of prometheus/rules is in the PrometheusRule, rule by rule."""
    groups = one(FOLDER / "prometheus-operator" / "rules.yaml", "PrometheusRule")["spec"]["groups"]
    files = sorted((ROOT / "prometheus" / "rules").glob("*.yml"))
    assert groups == [
        group for file in files for group in yaml.safe_load(file.read_text())["groups"]
    ]


@pytest.mark.parametrize("folder", [BASE, OVERLAY], ids=lambda folder: folder.name)
def test_everything_that_is_referred_to_exists(folder: Path) -> None:
    """Each resource, component and file of each kustomization is there, files in or below its own folder."""
    for where, found in kustomizations(folder):
        for name in [*found.get("resources", []), *found.get("components", [])]:
            assert (where / name / "kustomization.yaml").exists() or (where / name).is_file(), name
        files = [file for made in found.get("configMapGenerator", []) for file in made["files"]]
        assert all((where / file).is_file() and ".." not in file for file in files)


def test_every_dashboard_is_in_a_config_map_that_grafana_finds() -> None:
    """Each dashboard has a ConfigMap of its own, small enough, with the label of Grafana's sidecar."""
    folder = ROOT / "dashboards" / "json"
    found = manifests(folder / "kustomization.yaml")[0]
    files = [file for made in found["configMapGenerator"] for file in made["files"]]
    assert sorted(files) == sorted(path.name for path in folder.glob("*.json"))
    assert all((folder / file).stat().st_size < 1 << 20 for file in files)
    assert found["generatorOptions"]["labels"] == {"grafana_dashboard": "1"}


def test_selectors_ports_and_volumes_agree() -> None:
    """Service, PodMonitor and DaemonSet mean the same pods, port and folder."""
    labels = DAEMONSET["spec"]["template"]["metadata"]["labels"]
    monitor = one(FOLDER / "prometheus-operator" / "podmonitor.yaml", "PodMonitor")
    service = one(BASE / "service.yaml", "Service")
    selectors = [DAEMONSET["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    for selector in [*selectors, monitor["spec"]["selector"]["matchLabels"]]:
        assert selector
        assert selector.items() <= labels.items()

    (port,) = EXPORTER["ports"]
    assert f"0.0.0.0:{port['containerPort']}" in EXPORTER["args"]
    assert [port["name"]] == [end["port"] for end in monitor["spec"]["podMetricsEndpoints"]]
    assert [port["name"]] == [end["targetPort"] for end in service["spec"]["ports"]]
    assert (
        monitor["metadata"]["namespace"] == manifests(BASE / "kustomization.yaml")[0]["namespace"]
    )

    (volume,) = POD["volumes"]
    for container in (EXPORTER, RUN_DIR):
        assert [(volume["name"], volume["hostPath"]["path"])] == [
            (mount["name"], mount["mountPath"]) for mount in container["volumeMounts"]
        ]


def test_the_job_has_the_name_that_the_rules_know() -> None:
    """`up{job="torchmem"}` means these pods, and no label of the exporter's pod hides one of the training pod."""
    (endpoint,) = one(FOLDER / "prometheus-operator" / "podmonitor.yaml", "PodMonitor")["spec"][
        "podMetricsEndpoints"
    ]
    assert {"action": "replace", "targetLabel": "job", "replacement": "torchmem"} in endpoint[
        "relabelings"
    ]
    (dropped,) = [
        rule["regex"] for rule in endpoint["relabelings"] if rule["action"] == "labeldrop"
    ]
    assert {"pod", "namespace"} <= set(dropped.split("|"))


def test_the_exporter_has_no_privileges() -> None:
    """It is not root, gains nothing, writes nowhere but into the run directory, and requests no GPU."""
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert (
        f"USER {POD['securityContext']['runAsUser']}:"
        in (ROOT / "exporter" / "Dockerfile").read_text()
    )
    assert POD["automountServiceAccountToken"] is False
    for container in (EXPORTER, RUN_DIR):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"]
        assert "nvidia.com/gpu" not in str(container["resources"])
    assert "add" not in EXPORTER["securityContext"]["capabilities"]


def test_the_probes_do_not_ask_the_driver() -> None:
    """Liveness is the process's own; a hung driver restarts nothing."""
    assert EXPORTER["livenessProbe"]["httpGet"] == {"path": "/-/healthy", "port": "metrics"}
    assert EXPORTER["readinessProbe"]["httpGet"] == {"path": "/-/ready", "port": "metrics"}


def test_a_training_pod_never_waits_for_the_exporter() -> None:
    """The example publishes where the exporter reads, starts also where no exporter is, and mounts nothing else."""
    (volume,) = POD["volumes"]
    job = one(FOLDER / "examples" / "training-job.yaml", "Job")["spec"]["template"]["spec"]
    (mine,) = job["volumes"]
    assert mine["hostPath"] == volume["hostPath"]
    assert mine["hostPath"]["type"] == "DirectoryOrCreate"
    environment = {entry["name"]: entry.get("value") for entry in job["containers"][0]["env"]}
    assert environment["TORCHMEM_RUN_DIR"] == job["containers"][0]["volumeMounts"][0]["mountPath"]
    assert {"POD_NAME", "POD_NAMESPACE"} <= set(environment)


def built(folder: Path) -> str:
    """What kustomize makes of the folder."""
    if KUSTOMIZE is None:
        pytest.skip("needs kustomize or kubectl on PATH")
    return subprocess.run(
        [*KUSTOMIZE, str(folder)], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("folder", "kinds"),
    [
        (BASE, {"Namespace", "DaemonSet", "Service"}),
        (
            OVERLAY,
            {"Namespace", "DaemonSet", "Service", "PodMonitor", "PrometheusRule", "ConfigMap"},
        ),
    ],
    ids=["base", "gpu-operator"],
)
def test_kustomize_builds_it(folder: Path, kinds: set[str]) -> None:
    """The real kustomize builds everything, with an image of an exact version."""
    text = built(folder)
    documents = list(yaml.safe_load_all(text))
    assert {document["kind"] for document in documents} == kinds
    (pod,) = [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "DaemonSet"]
    version = pod["containers"][0]["image"].removeprefix("torchmem/exporter:")
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("source", ["base", "overlay", "example"])
def test_the_schemas_of_kubernetes_accept_it(source: str, tmp_path: Path) -> None:
    """Kubernetes' own OpenAPI schemas know every field of the built-in kinds."""
    if shutil.which("kubernetes-validate") is None:
        pytest.skip("needs kubernetes-validate: pip install kubernetes-validate")
    file = FOLDER / "examples" / "training-job.yaml"
    if source != "example":
        file = tmp_path / "built.yaml"
        file.write_text(built(BASE if source == "base" else OVERLAY))
    done = subprocess.run(
        ["kubernetes-validate", "--strict", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
