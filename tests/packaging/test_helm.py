"""The Helm chart, rendered by Helm's own engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.operator_objects import OPERATOR, kept
from support.scrape_limits import NODE_LIMITS

from torchmem.explain.thresholds import changed, defaults
from torchmem.exporter.pod_names import CONTAINER_LOGS
from torchmem.exporter.pod_resources import KUBELET_SOCKET
from torchmem.manifests.render import render

helm = pytest.importorskip("helm_python", reason="Helm's engine has no package for this platform")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "torchmem"
VERSIONS = [f"1.{minor}" for minor in range(27, 38)]
# In C, which is ten times as fast for the rules and dashboards.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
PROBED = ("healthy", "ready")
_INFO = 1  # such as a chart without an icon

Values = Mapping[str, Any]
Manifest = dict[str, Any]

PROMETHEUS_STACK: Values = {
    "podMonitor": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "GPUs"}},
}
GPU_OPERATOR: Values = {**PROMETHEUS_STACK, "podNames": {"enabled": True}}
MIG: Values = {
    "podNames": {"enabled": True, "kubeletSocket": True},
    "extraEnv": [{"name": "NVIDIA_MIG_MONITOR_DEVICES", "value": "all"}],
    "podSecurityContext": {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0},
    "nodeSelector": {"nvidia.com/gpu.present": "true", "nvidia.com/mig.capable": "true"},
}
SHARED: Values = {
    "podNames": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True, "thresholds": {"stranded_bytes": "2GiB"}},
}
LOCKED_DOWN: Values = {
    "hostPID": False,
    "image": {"repository": "registry.example.com/exporter", "digest": f"sha256:{'5' * 64}"},
    "imagePullSecrets": [{"name": "registry"}],
    "webConfig": {"existingSecret": "torchmem-web", "tls": True},
    "podMonitor": {
        "enabled": True,
        "endpoint": {
            "basicAuth": {
                "username": {"name": "torchmem-prometheus", "key": "user"},
                "password": {"name": "torchmem-prometheus", "key": "password"},
            },
            "tlsConfig": {
                "ca": {"secret": {"name": "torchmem-prometheus", "key": "ca.pem"}},
                "serverName": "torchmem",
            },
        },
    },
    "networkPolicy": {"enabled": True},
    "priorityClassName": "",
}
CONFIGURATIONS = {
    "defaults": {},
    "kube-prometheus-stack": PROMETHEUS_STACK,
    "gpu-operator": GPU_OPERATOR,
    "mig": MIG,
    "shared": SHARED,
    "locked-down": LOCKED_DOWN,
}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The chart as it is packaged, loaded by Helm."""
    archive = helm.package(CHART, destination=tmp_path_factory.mktemp("chart"))
    with helm.Chart.load(archive) as loaded:
        yield loaded


def manifests(chart: Any, values: Values) -> dict[str, list[Manifest]]:
    """Return the rendered manifests by kind."""
    texts = chart.render(dict(values), name="torchmem", namespace="monitoring")
    found: dict[str, list[Manifest]] = {}
    for name, text in texts.items():
        for manifest in yaml.load_all(text, LOADER) if name.endswith(".yaml") else ():
            if manifest:
                found.setdefault(manifest["kind"], []).append(manifest)
    return found


def only(chart: Any, kind: str, values: Values) -> Manifest:
    """Return the only manifest of a kind."""
    (manifest,) = manifests(chart, values)[kind]
    return manifest


@pytest.mark.parametrize(
    ("name", "version"),
    [(name, version) for name in CONFIGURATIONS for version in (VERSIONS[0], VERSIONS[-1])]
    + [("gpu-operator", version) for version in VERSIONS[1:-1]],
)
def test_kubernetes_accepts_it(chart: Any, name: str, version: str) -> None:
    """Every built-in object satisfies the schemas of the supported versions of Kubernetes."""
    for kind in manifests(chart, CONFIGURATIONS[name]).values():
        for manifest in kind:
            if manifest["apiVersion"] != OPERATOR:
                kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_operator_accepts_it(chart: Any, name: str) -> None:
    """The operator's definitions keep every field of monitors and rules, and refuse no value."""
    found = [
        manifest
        for kind in manifests(chart, CONFIGURATIONS[name]).values()
        for manifest in kind
        if manifest["apiVersion"] == OPERATOR
    ]

    assert [kept(manifest) for manifest in found] == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interval": "fifteen"}, "interval"),
        ({"scheme": "ftp"}, "scheme"),
        ({"basicAuth": {"username": {"name": "web"}}}, "key"),
    ],
)
def test_the_operator_refuses_a_mistake(
    chart: Any, change: Mapping[str, Any], message: str
) -> None:
    """The check is one: it refuses wrong values, and notices fields that are unknown."""
    monitor = only(chart, "PodMonitor", PROMETHEUS_STACK)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]

    with pytest.raises(ValueError, match=message):
        kept({**monitor, "spec": {**monitor["spec"], "podMetricsEndpoints": [endpoint | change]}})
    unknown = {**monitor, "spec": {**monitor["spec"], "sampleLimits": 1}}
    assert kept(unknown) == monitor


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_helm_finds_no_fault(name: str) -> None:
    """Helm's linter accepts the chart with these values."""
    result = helm.lint(CHART, dict(CONFIGURATIONS[name]), strict=True, quiet=True)

    severe = [found for found in result["messages"] if found["severity"] > _INFO]
    assert (result["errors"], severe) == ([], [])


def test_rules_are_the_shipped_ones(chart: Any) -> None:
    """Without other thresholds, the PrometheusRule contains what prometheus/rules contains."""
    rule = only(chart, "PrometheusRule", {"prometheusRule": {"enabled": True}})

    assert rule["spec"]["groups"] == groups(render(defaults()))


THRESHOLDS = {
    "stranded_bytes": "1.5GiB",
    "gpu_idle_bytes": 123456789,
    "near_capacity_ratio": 0.02,
    "gpu_lost_for": "90s",
    "gpu_ignored_xids": [13, 31],
    "runbooks_at": "https://example.com/runbooks",
    "dashboards_at": "https://grafana.example.com",
}


def test_thresholds_mean_the_same_as_in_a_file(chart: Any) -> None:
    """Thresholds in the chart's values give the rules that a file of the same thresholds gives."""
    rule = only(
        chart, "PrometheusRule", {"prometheusRule": {"enabled": True, "thresholds": THRESHOLDS}}
    )

    assert rule["spec"]["groups"] == groups(render(changed(THRESHOLDS, "the test")))


def test_the_exporters_judge_by_the_thresholds_of_the_rules(chart: Any) -> None:
    """Thresholds in the chart's values are in a file that the exporter reads."""
    values = {"prometheusRule": {"enabled": True, "thresholds": THRESHOLDS}}
    text = only(chart, "ConfigMap", values)["data"]["thresholds.yml"]
    pod = only(chart, "DaemonSet", values)["spec"]["template"]["spec"]
    (flag,) = [a for a in pod["containers"][0]["args"] if a.startswith("--thresholds=")]
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "thresholds"]

    assert changed(yaml.safe_load(text), "the chart") == changed(THRESHOLDS, "the test")
    assert flag == f"--thresholds={mount['mountPath']}/thresholds.yml"
    assert "thresholds" not in json.dumps(only(chart, "DaemonSet", {}))


def groups(files: Mapping[str, str]) -> list[Any]:
    """Return the groups of rules files, in the order of their names."""
    return [group for _, text in sorted(files.items()) for group in yaml.safe_load(text)["groups"]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prometheusRule": {"thresholds": {"stranded_byte": 1}}}, "stranded_byte is unknown"),
        (
            {"prometheusRule": {"thresholds": {"stranded_bytes": "2 GB"}}},
            "give a size such as 1GiB",
        ),
        ({"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}, "disable one"),
        ({"podMonitor": {"enable": True}}, "enable"),
        ({"hostPID": "yes"}, "hostPID"),
        ({"podNames": {"kubeletSocket": True}}, "needs root"),
        ({"tolerations": {}}, "tolerations"),
    ],
)
def test_wrong_values_are_refused(chart: Any, values: Values, message: str) -> None:
    """A misspelled value does not install something else than what was meant."""
    rule = {"enabled": True, **values.get("prometheusRule", {})}
    with pytest.raises(helm.HelmError, match=message):
        chart.render({**values, "prometheusRule": rule}, name="torchmem", namespace="monitoring")


def test_every_value_is_documented() -> None:
    """values.yaml has a comment for each value, which is its description in the schema."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    assert list(_undescribed(schema, ())) == []


def _undescribed(schema: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if "properties" not in schema and "description" not in schema:
        yield ".".join(path)
    for name, inner in schema.get("properties", {}).items():
        yield from _undescribed(inner, (*path, name))


def test_the_page_of_settings_lists_every_value() -> None:
    """docs/settings.md has a row for each value that has a description, with its default."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    page = (ROOT / "docs" / "settings.md").read_text().partition("## Values of the chart")[2]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", page, re.MULTILINE))

    defaults_shown = {name: json.loads(default) for name, default in rows.items()}
    assert defaults_shown == dict(_described(schema, values, ""))


def _described(schema: Mapping[str, Any], value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if "description" in schema:
        yield name, value
    for key, inner in schema.get("properties", {}).items():
        yield from _described(inner, value[key], f"{name}.{key}".lstrip("."))


def test_selectors_find_the_pods(chart: Any) -> None:
    """Service, monitors and policy select the DaemonSet's pods and their port."""
    daemonset = only(chart, "DaemonSet", {})
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    (port,) = daemonset["spec"]["template"]["spec"]["containers"][0]["ports"]
    policy = only(chart, "NetworkPolicy", LOCKED_DOWN)["spec"]
    service = only(chart, "Service", {})
    pods = only(chart, "PodMonitor", PROMETHEUS_STACK)["spec"]
    services = only(chart, "ServiceMonitor", SHARED)["spec"]

    for selector in (
        daemonset["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        pods["selector"]["matchLabels"],
        policy["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert services["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {
        port["name"],
        service["spec"]["ports"][0]["name"],
        service["spec"]["ports"][0]["targetPort"],
        pods["podMetricsEndpoints"][0]["port"],
        services["endpoints"][0]["port"],
        policy["ingress"][0]["ports"][0]["port"],
    } == {"metrics"}


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_job_and_instance_are_those_of_the_rules(chart: Any, kind: str) -> None:
    """Each monitor names the job and the node as the rules expect, and has the scrape limits."""
    enabled = {kind[0].lower() + kind[1:]: {"enabled": True}}
    spec = only(chart, kind, enabled)["spec"]
    (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
    rules = {rule.get("targetLabel"): rule for rule in endpoint["relabelings"]}

    assert rules["job"]["replacement"] == defaults().values["exporter_job"]
    assert rules["instance"]["sourceLabels"] == ["__meta_kubernetes_pod_node_name"]
    for name, limit in NODE_LIMITS.items():
        assert spec[re.sub("_[a-z]", lambda part: part[0][1].upper(), name)] == limit


def test_every_dashboard_is_a_config_map(chart: Any) -> None:
    """Each dashboard has its own ConfigMap, with the JSON of the repository."""
    found = {
        name: text
        for config_map in manifests(chart, PROMETHEUS_STACK)["ConfigMap"]
        for name, text in config_map["data"].items()
    }

    assert found == {
        path.name: path.read_text() for path in (ROOT / "dashboards" / "json").glob("*.json")
    }


def test_names_of_pods_come_without_their_logs(chart: Any) -> None:
    """podNames mounts only the folder of links, read-only."""
    pod = only(chart, "DaemonSet", {"podNames": {"enabled": True}})["spec"]["template"]["spec"]
    (folder,) = [v["hostPath"]["path"] for v in pod["volumes"] if v["name"] == "container-logs"]
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}

    assert (folder, mounts["container-logs"]["mountPath"]) == (str(CONTAINER_LOGS),) * 2
    assert mounts["container-logs"]["readOnly"]


def test_the_exporter_can_read_its_secret(chart: Any) -> None:
    """The files of a secret are root's with the group fsGroup, and only the group may read them."""
    pod = only(chart, "DaemonSet", LOCKED_DOWN)["spec"]["template"]["spec"]
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    context = pod["securityContext"]

    assert (secret["defaultMode"], context["runAsNonRoot"]) == (0o440, True)
    assert context["fsGroup"] == context["runAsGroup"]


@pytest.mark.parametrize(
    ("values", "probes"),
    [
        ({}, [{"httpGet": {"path": f"/-/{path}", "port": "metrics"}} for path in PROBED]),
        (LOCKED_DOWN, [{"tcpSocket": {"port": "metrics"}}] * 2),
    ],
    ids=["open", "password"],
)
def test_a_password_does_not_fail_the_probes(
    chart: Any, values: Values, probes: list[Mapping[str, Any]]
) -> None:
    """With web.yml, which may ask every request for a password, the kubelet only connects."""
    daemonset = only(chart, "DaemonSet", values)
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    found = [container["livenessProbe"], container["readinessProbe"]]

    assert [
        {kind: probe[kind] for kind in ("httpGet", "tcpSocket") if kind in probe} for probe in found
    ] == probes


def test_the_kubelet_is_asked_by_root_only(chart: Any) -> None:
    """The folder of the kubelet's socket is mounted, and the exporter may connect and asks it."""
    pod = only(chart, "DaemonSet", MIG)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (folder,) = [v["hostPath"]["path"] for v in pod["volumes"] if v["name"] == "pod-resources"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}

    assert pod["securityContext"]["runAsUser"] == 0
    assert (folder, mounts["pod-resources"]["mountPath"]) == (str(KUBELET_SOCKET.parent),) * 2
    assert f"--kubelet-socket={KUBELET_SOCKET}" in container["args"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_versions_agree() -> None:
    """Chart, application and Python distribution have one version."""
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = metadata["version"]

    assert metadata["appVersion"] == version
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
