"""The manifests in deploy/kubernetes agree with each other and request few privileges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.kustomize import built
from support.linked_rules import shipped_groups
from support.operator_objects import OPERATOR, kept

from torchmem.exporter.pod_names import CONTAINER_LOGS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
BASE, OVERLAY = FOLDER / "base", FOLDER / "overlays" / "gpu-operator"
Manifest = dict[str, Any]


def manifests(path: Path) -> list[Manifest]:
    """Return the YAML documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def manifest_of(path: Path, kind: str) -> Manifest:
    """Return the only document of this kind in a file."""
    (manifest,) = [manifest for manifest in manifests(path) if manifest["kind"] == kind]
    return manifest


DAEMONSET = manifest_of(BASE / "daemonset.yaml", "DaemonSet")
POD: dict[str, Any] = DAEMONSET["spec"]["template"]["spec"]
(EXPORTER,) = POD["containers"]
(RUN_DIR,) = POD["initContainers"]


def kustomizations(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the kustomization of a folder and all kustomizations that it refers to."""
    kustomization = manifests(folder / "kustomization.yaml")[0]
    yield folder, kustomization
    for other in [*kustomization.get("resources", []), *kustomization.get("components", [])]:
        if (folder / other).is_dir():
            yield from kustomizations(folder / other)


def test_the_rules_are_those_of_prometheus() -> None:
    """The PrometheusRule contains the groups of prometheus/rules, with links that open."""
    groups = manifest_of(FOLDER / "prometheus-operator" / "rules.yaml", "PrometheusRule")["spec"][
        "groups"
    ]
    assert groups == shipped_groups("*.yml")


@pytest.mark.parametrize("folder", [BASE, OVERLAY], ids=lambda folder: folder.name)
def test_every_reference_exists(folder: Path) -> None:
    """Each resource, component and file exists; files lie in the folder of the kustomization."""
    for where, kustomization in kustomizations(folder):
        for name in [*kustomization.get("resources", []), *kustomization.get("components", [])]:
            assert (where / name / "kustomization.yaml").exists() or (where / name).is_file(), name
        for config_map in kustomization.get("configMapGenerator", []):
            for file in config_map["files"]:
                assert (where / file).is_file()
                assert ".." not in file


def test_every_dashboard_is_in_a_config_map_that_grafana_finds() -> None:
    """Each dashboard has its own ConfigMap below 1 MiB, with the label of Grafana's sidecar."""
    folder = ROOT / "dashboards" / "json"
    kustomization = manifests(folder / "kustomization.yaml")[0]
    config_maps = kustomization["configMapGenerator"]
    files = [file for config_map in config_maps for file in config_map["files"]]
    assert sorted(files) == sorted(path.name for path in folder.glob("*.json"))
    assert all((folder / file).stat().st_size < 1 << 20 for file in files)
    assert kustomization["generatorOptions"]["labels"] == {"grafana_dashboard": "1"}


def test_selectors_ports_and_volumes_agree() -> None:
    """Service, PodMonitor and DaemonSet use the same pods, port and folder."""
    labels = DAEMONSET["spec"]["template"]["metadata"]["labels"]
    monitor = manifest_of(FOLDER / "prometheus-operator" / "podmonitor.yaml", "PodMonitor")
    service = manifest_of(BASE / "service.yaml", "Service")
    selectors = [DAEMONSET["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    for selector in [*selectors, monitor["spec"]["selector"]["matchLabels"]]:
        assert selector
        assert selector.items() <= labels.items()

    (port,) = EXPORTER["ports"]
    assert f"--listen=0.0.0.0:{port['containerPort']}" in EXPORTER["args"]
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
    """The job is named torchmem, and labels of the exporter's pod hide none of the training pod."""
    (endpoint,) = manifest_of(FOLDER / "prometheus-operator" / "podmonitor.yaml", "PodMonitor")[
        "spec"
    ]["podMetricsEndpoints"]
    assert {"action": "replace", "targetLabel": "job", "replacement": "torchmem"} in endpoint[
        "relabelings"
    ]
    (dropped,) = [
        rule["regex"] for rule in endpoint["relabelings"] if rule["action"] == "labeldrop"
    ]
    assert {"pod", "namespace"} <= set(dropped.split("|"))


def test_the_exporter_has_no_privileges() -> None:
    """The exporter is not root, has no capabilities, a read-only root, and requests no GPU."""
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


def test_the_run_directory_keeps_its_mode() -> None:
    """Without FSETID, the kernel clears set-group-ID unless the process has the group."""
    command = RUN_DIR["command"]
    context = RUN_DIR["securityContext"]
    assert str(context["runAsGroup"]) == command[command.index("-g") + 1]
    assert context["capabilities"]["add"] == ["CHOWN", "FOWNER"]


def test_the_probes_do_not_call_the_driver() -> None:
    """The probes do not depend on the driver, so a hung driver causes no restart."""
    assert EXPORTER["livenessProbe"]["httpGet"] == {"path": "/-/healthy", "port": "metrics"}
    assert EXPORTER["readinessProbe"]["httpGet"] == {"path": "/-/ready", "port": "metrics"}


def test_a_training_pod_never_waits_for_the_exporter() -> None:
    """The example writes where the exporter reads, and starts on nodes without an exporter."""
    (volume,) = POD["volumes"]
    job = manifest_of(FOLDER / "examples" / "training-job.yaml", "Job")["spec"]["template"]["spec"]
    (job_volume,) = job["volumes"]
    assert job_volume["hostPath"] == volume["hostPath"]
    assert job_volume["hostPath"]["type"] == "DirectoryOrCreate"
    environment = {entry["name"]: entry.get("value") for entry in job["containers"][0]["env"]}
    assert environment["TORCHMEM_RUN_DIR"] == job["containers"][0]["volumeMounts"][0]["mountPath"]
    assert {"POD_NAME", "POD_NAMESPACE"} <= set(environment)


@pytest.mark.parametrize("name", ["training-job", "training-job-sidecar"])
def test_a_training_pod_is_not_root(name: str) -> None:
    """The examples run as a user of their own, as the exporter tells tenants apart by user ID."""
    job = manifest_of(FOLDER / "examples" / f"{name}.yaml", "Job")["spec"]["template"]["spec"]
    context = job["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"] > 0) == (True, True)
    assert context["runAsUser"] != POD["securityContext"]["runAsUser"]
    for container in job["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_only_prometheus_may_connect() -> None:
    """The policy covers the exporter's pods, which have a network of their own, and their port.

    A client is known by its namespace, because each tenant chooses the labels of its own pods.
    """
    policy = manifest_of(FOLDER / "network-policy" / "networkpolicy.yaml", "NetworkPolicy")["spec"]
    labels = DAEMONSET["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert not POD.get("hostNetwork")
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["egress"] == []
    (rule,) = policy["ingress"]
    assert [EXPORTER["ports"][0]["name"]] == [port["port"] for port in rule["ports"]]
    for client in rule["from"]:
        assert "kubernetes.io/metadata.name" in client["namespaceSelector"]["matchLabels"]


def test_the_exporter_sees_the_names_of_containers_only() -> None:
    """The component mounts the default folder of the exporter read-only, and no folder of logs."""
    component = manifests(FOLDER / "pod-names" / "kustomization.yaml")[0]
    (patch,) = component["patches"]
    added = {step["path"]: step["value"] for step in yaml.safe_load(patch["patch"])}
    volume = added["/spec/template/spec/volumes/-"]
    mount = added["/spec/template/spec/containers/0/volumeMounts/-"]

    assert patch["target"] == {"kind": "DaemonSet", "name": DAEMONSET["metadata"]["name"]}
    assert POD["containers"][0] is EXPORTER
    assert volume == {"name": mount["name"], "hostPath": {"path": str(CONTAINER_LOGS)}}
    assert (mount["mountPath"], mount["readOnly"]) == (str(CONTAINER_LOGS), True)


def test_the_pod_monitor_finds_the_sidecar() -> None:
    """Job and PodMonitor of the example without a DaemonSet agree on label, port and volume.

    The job name is not that of the nodes' exporters, whose absence is an alert.
    """
    job = manifest_of(FOLDER / "examples" / "training-job-sidecar.yaml", "Job")
    monitor = manifest_of(FOLDER / "examples" / "podmonitor-sidecar.yaml", "PodMonitor")["spec"]
    template = job["spec"]["template"]
    (exporter,) = template["spec"]["initContainers"]
    (container,) = template["spec"]["containers"]
    (port,) = exporter["ports"]
    (endpoint,) = monitor["podMetricsEndpoints"]

    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert port["name"] == endpoint["port"]
    assert f"--listen=0.0.0.0:{port['containerPort']}" in exporter["args"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    for each in (exporter, container):
        (mount,) = each["volumeMounts"]
        environment = {entry["name"]: entry.get("value") for entry in each["env"]}
        assert environment["TORCHMEM_RUN_DIR"] == mount["mountPath"]
    replaced = {rule.get("targetLabel"): rule for rule in endpoint["relabelings"]}
    assert replaced["job"]["replacement"] not in {"torchmem", ""}
    assert replaced["instance"]["sourceLabels"] == ["__meta_kubernetes_pod_name"]


@pytest.mark.parametrize(
    ("folder", "kinds"),
    [
        (BASE, {"Namespace", "DaemonSet", "Service"}),
        (
            OVERLAY,
            {"Namespace", "DaemonSet", "Service", "NetworkPolicy"}
            | {"PodMonitor", "PrometheusRule", "ConfigMap"},
        ),
    ],
    ids=["base", "gpu-operator"],
)
def test_kustomize_builds_it(folder: Path, kinds: set[str]) -> None:
    """kustomize builds these kinds, with an image that a user's kustomization has to replace."""
    text = built(folder)
    documents = list(yaml.safe_load_all(text))
    assert {document["kind"] for document in documents} == kinds
    (pod,) = [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "DaemonSet"]
    assert pod["containers"][0]["image"] == "localhost/torchmem-exporter:unset"


@pytest.mark.parametrize("source", ["base", "overlay", "training-job", "training-job-sidecar"])
def test_the_schemas_of_kubernetes_accept_it(source: str, tmp_path: Path) -> None:
    """The OpenAPI schemas of Kubernetes accept every field of the built-in kinds."""
    file = FOLDER / "examples" / f"{source}.yaml"
    if source in {"base", "overlay"}:
        file = tmp_path / "built.yaml"
        file.write_text(built(BASE if source == "base" else OVERLAY))
    newest = kubernetes_validate.latest_version()
    for manifest in manifests(file):
        if "monitoring.coreos.com" not in manifest["apiVersion"]:
            kubernetes_validate.validate(manifest, newest, strict=True)


def test_the_operator_accepts_its_kinds() -> None:
    """The operator's definitions keep every field of the monitors and rules."""
    found = [
        manifest
        for path in sorted(FOLDER.rglob("*.yaml"))
        for manifest in manifests(path)
        if manifest.get("apiVersion") == OPERATOR
    ]

    assert {manifest["kind"] for manifest in found} == {"PodMonitor", "PrometheusRule"}
    assert [kept(manifest) for manifest in found] == found
