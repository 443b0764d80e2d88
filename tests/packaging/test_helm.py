"""The Helm chart, rendered by Helm's own engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.helm.build import comments
from support.helm_chart import CHART, IMAGE, ROOT, Values, documented, manifests, only, rendered
from support.operator_objects import OPERATOR, kept
from support.scrape_limits import NODE_LIMITS

from torchmem.explain.thresholds import changed, defaults
from torchmem.exporter.pod_names import CONTAINER_LOGS
from torchmem.exporter.pod_resources import KUBELET_SOCKET
from torchmem.manifests.render import prometheus_rule

helm = pytest.importorskip("helm_python", reason="Helm's engine has no package for this platform")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSIONS = [f"1.{minor}" for minor in range(27, 38)]
PROBED = ("healthy", "ready")
_INFO = 1  # such as a chart without an icon

DOCUMENTED = documented()
PROMETHEUS_STACK = DOCUMENTED["kube-prometheus-stack and Grafana's sidecar"]
MIG, LOCKED_DOWN = DOCUMENTED["MIG"], DOCUMENTED["locked down"]
SERVICE_MONITOR: Values = {
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True, "thresholds": {"stranded_bytes": "2GiB"}},
}
CONFIGURATIONS = {"defaults": {}, "serviceMonitor": SERVICE_MONITOR, **DOCUMENTED}


def test_the_page_shows_six_configurations() -> None:
    """Each set of values on the page is rendered here."""
    assert len(DOCUMENTED) == 6


@pytest.mark.parametrize(
    ("name", "version"),
    [(name, version) for name in CONFIGURATIONS for version in (VERSIONS[0], VERSIONS[-1])]
    + [("locked down", version) for version in VERSIONS[1:-1]],
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
    result = helm.lint(CHART, {"image": IMAGE, **CONFIGURATIONS[name]}, strict=True, quiet=True)

    severe = [found for found in result["messages"] if found["severity"] > _INFO]
    assert (result["errors"], severe) == ([], [])


def test_rules_are_the_shipped_ones(chart: Any) -> None:
    """Without other thresholds, the PrometheusRule is that of `torchmem manifests rules`."""
    rule = only(chart, "PrometheusRule", {"prometheusRule": {"enabled": True}})

    assert rule["spec"] == yaml.safe_load(prometheus_rule(defaults(), "any"))["spec"]


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

    expected = prometheus_rule(changed(THRESHOLDS, "the test"), "any")
    assert rule["spec"] == yaml.safe_load(expected)["spec"]


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image": {}}, "Set image.repository, and image.tag or image.digest,"),
        ({"image": {"repository": "registry.example.com/x"}}, "image.tag or image.digest"),
        ({"image": {"tag": "v1"}}, "Set image.repository"),
        ({"image": {**IMAGE, "digest": "sha256:5"}}, "both set"),
        ({"podmonitor": {"enabled": True}}, "podmonitor"),
        ({"nodeSelector": {"gpu": True}}, "nodeSelector"),
        ({"podMonitor": {"endpoint": {"relabelings": []}}}, "relabelings"),
        *(
            ({"prometheusRule": {"thresholds": {name: value}}}, message)
            for name, value, message in (
                ("stranded_byte", 1, "stranded_byte"),
                ("stranded_bytes", "2 GB", "give a size such as 1GiB"),
                ("stranded_ratio", 5, "stranded_ratio"),
                ("retries_per_minute", "2", "retries_per_minute"),
                ("gpu_lost_for", "soon", "gpu_lost_for"),
                ("gpu_ignored_xids", 13, "gpu_ignored_xids"),
                ("runbooks_at", "/user/docs/runbooks", "runbooks_at"),
                ("dashboards_at", "https://grafana.example.com/", "dashboards_at"),
            )
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
        rendered(chart, {**values, "prometheusRule": rule})


@pytest.mark.parametrize("path", sorted(comments()), ids=".".join)
def test_a_misspelled_key_is_refused_at_every_level(chart: Any, path: tuple[str, ...]) -> None:
    """No value can be misspelled without an error, and neither can the section that it is in."""
    for depth in range(len(path)):
        *sections, last = path[: depth + 1]
        values: dict[str, Any] = {f"{last}x": {}}
        for name in reversed(sections):
            values = {name: values}
        with pytest.raises(helm.HelmError, match=f"{last}x"):
            rendered(chart, values)


def test_a_chart_with_this_one_as_a_dependency(tmp_path: Path) -> None:
    """The parent's `global` and the condition `torchmem.enabled` are no misspelled values."""
    for folder in ("templates", "charts"):
        (tmp_path / "parent" / folder).mkdir(parents=True)
    helm.package(CHART, destination=tmp_path / "parent" / "charts")
    dependency = {"name": "torchmem", "version": "0.0.0", "condition": "torchmem.enabled"}
    parent = {"apiVersion": "v2", "name": "parent", "version": "1.0.0"}
    (tmp_path / "parent" / "Chart.yaml").write_text(
        json.dumps({**parent, "dependencies": [{**dependency, "repository": ""}]})
    )
    values = {"global": {"imageRegistry": "x"}, "torchmem": {"enabled": True, "image": IMAGE}}
    with helm.Chart.load(tmp_path / "parent") as loaded:
        texts = loaded.render(values, name="parent", namespace="monitoring")

    assert "kind: DaemonSet" in texts["parent/charts/torchmem/templates/daemonset.yaml"]


def test_every_value_is_documented() -> None:
    """values.yaml has a comment for each value, which is its description in the schema."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    assert list(_undescribed(schema, ())) == []


def _undescribed(schema: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if "properties" not in schema and "description" not in schema:
        yield ".".join(path)
    for name, inner in schema.get("properties", {}).items() if "description" not in schema else ():
        yield from _undescribed(inner, (*path, name))


def test_selectors_find_the_pods(chart: Any) -> None:
    """Service, monitors and policy select the DaemonSet's pods and their port."""
    daemonset = only(chart, "DaemonSet", {})
    labels = daemonset["spec"]["template"]["metadata"]["labels"]
    (port,) = daemonset["spec"]["template"]["spec"]["containers"][0]["ports"]
    policy = only(chart, "NetworkPolicy", LOCKED_DOWN)["spec"]
    service = only(chart, "Service", {})
    pods = only(chart, "PodMonitor", PROMETHEUS_STACK)["spec"]
    services = only(chart, "ServiceMonitor", SERVICE_MONITOR)["spec"]

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


@pytest.mark.parametrize("runbooks", [None, "https://docs.example.org/runbooks"])
def test_every_dashboard_is_a_config_map(chart: Any, runbooks: str | None) -> None:
    """Each dashboard has its own ConfigMap, with the JSON of the repository.

    Only its links to runbooks differ: to those that are published, or none.
    """
    thresholds = {"thresholds": {"runbooks_at": runbooks}} if runbooks else {}
    values = {"dashboards": {"enabled": True}, "prometheusRule": thresholds}
    found = {
        name: json.loads(text)
        for config_map in manifests(chart, values)["ConfigMap"]
        for name, text in config_map["data"].items()
        if name != "thresholds.yml"
    }

    assert found == {
        path.name: json.loads(path.read_text(), object_hook=partial(_linked, runbooks))
        for path in (ROOT / "dashboards" / "json").glob("*.json")
    }


def _linked(runbooks: str | None, part: Any) -> Any:
    """Return a part of a dashboard with links to these runbooks instead of Prometheus'."""
    if part.get("title") == "Open the runbook":
        return {**part, "url": f"{runbooks}/${{__value.raw}}.md"} if runbooks else None
    return {
        key: [each for each in value if each != {"id": "links", "value": [None]}]
        if key == "properties"
        else value
        for key, value in part.items()
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


def test_a_chart_of_a_commit_is_valid(tmp_path: Path) -> None:
    """Helm takes a commit's version, and the labels that contain it are valid."""
    name = f"0.1.1-dev.1234+g{'5' * 10}.dirty"
    archive = helm.package(CHART, destination=tmp_path, version=name, app_version=name)
    with helm.Chart.load(archive) as loaded:
        found = manifests(loaded, {})
    labels = [each["metadata"]["labels"] for kind in found.values() for each in kind]

    assert Path(archive).name == f"torchmem-{name}.tgz"
    assert {each["app.kubernetes.io/version"] for each in labels} == {name.replace("+", "_")}
    values = [value for each in labels for value in each.values()]
    assert all(re.fullmatch(r"[A-Za-z0-9]([\w.-]{,61}[A-Za-z0-9])?", value) for value in values)
