"""What each value of the Helm chart does to the rendered manifests."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from deploy.helm.build import comments
from deploy.helm.build import values as shipped
from deploy.urls import LOCAL_RUNBOOKS
from support.helm_chart import CHART, IMAGE, Manifest, Values, documented, manifests, rendered

helm = pytest.importorskip("helm_python", reason="Helm's engine has no package for this platform")

Found = Mapping[str, list[Manifest]]
Read = Callable[[Found], Any]
DIGEST = f"sha256:{'5' * 64}"
GPU_NODES = {"nvidia.com/gpu.present": "true"}
AUTH = {"username": {"name": "web", "key": "user"}}
EVERYTHING = ("podMonitor", "prometheusRule", "dashboards", "networkPolicy")


def at(name: str, value: Any) -> dict[str, Any]:
    """Return the values with one value, by its dotted name."""
    for key in reversed(name.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def merged(*values: Values) -> dict[str, Any]:
    """Return the values as Helm merges those of several --set and --values."""
    result: dict[str, Any] = {}
    for each in values:
        for name, value in each.items():
            both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
            result[name] = merged(result[name], value) if both else value
    return result


def template(found: Found) -> Manifest:
    """Return the template of the exporter's pods."""
    (daemonset,) = found["DaemonSet"]
    result: Manifest = daemonset["spec"]["template"]
    return result


def pod(field: str) -> Read:
    """Read a field of the pods; None if it is absent."""
    return lambda found: template(found)["spec"].get(field)


def exporter(field: str) -> Read:
    """Read a field of the exporter's container."""
    return lambda found: template(found)["spec"]["containers"][0].get(field)


def containers(field: str) -> Read:
    """Read a field of all containers, which have the same value."""

    def read(found: Found) -> Any:
        spec = template(found)["spec"]
        first, second = (each.get(field) for each in spec["initContainers"] + spec["containers"])
        assert first == second
        return first

    return read


def of(kind: str, *path: str) -> Read:
    """Read a field of the only object of a kind; None if it is absent."""

    def read(found: Found) -> Any:
        value: Any
        (value,) = found[kind]
        for key in path:
            value = (value or {}).get(key)
        return value

    return read


def endpoint(kind: str, field: str) -> Read:
    """Read a field of a monitor's endpoint."""

    def read(found: Found) -> Any:
        (monitor,) = found[kind]
        spec = monitor["spec"]
        (only,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
        return only.get(field)

    return read


def named(*kinds: str) -> Read:
    """Read the names of the objects of these kinds, without those of the dashboards."""
    return lambda found: {
        each["metadata"]["name"]
        for kind in kinds or found
        for each in found[kind]
        if not each["metadata"]["name"].startswith("torchmem-dashboard-")
    }


def volumes(found: Found) -> dict[str, str]:
    """Read the mounted folders of the node: where the exporter sees them."""
    spec = template(found)["spec"]
    mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    return {
        each["hostPath"]["path"]: mounts[each["name"]]
        for each in spec["volumes"]
        if "hostPath" in each
    }


def environment(found: Found) -> dict[str, str]:
    """Read the variables of the exporter."""
    return {each["name"]: each["value"] for each in exporter("env")(found)}


def flags(found: Found) -> list[str]:
    """Read the flags that not every exporter has."""
    return exporter("args")(found)[2:]  # type: ignore[no-any-return]


def run_directory(found: Found) -> set[str]:
    """Read every mention of the run directory."""
    (init,) = template(found)["spec"]["initContainers"]
    path = environment(found)["TORCHMEM_RUN_DIR"]
    return {path, volumes(found)[path], init["command"][-1], init["volumeMounts"][0]["mountPath"]}


def owner(found: Found) -> tuple[Any, ...]:
    """Read the owner of the run directory, the exporter's user, and whether it may be root."""
    (init,) = template(found)["spec"]["initContainers"]
    context = template(found)["spec"]["securityContext"]
    return (init["command"][5], init["command"][7], context["runAsUser"], context["runAsNonRoot"])


def links(found: Found) -> set[str]:
    """Read which annotations alerts have."""
    (rule,) = found["PrometheusRule"]
    alerts = [
        each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each
    ]
    (names,) = {frozenset(each["annotations"]) for each in alerts}
    return set(names)


def board(*path: str) -> Read:
    """Read a field of the metadata of every dashboard."""

    def read(found: Found) -> Any:
        values = [each["metadata"] for each in found["ConfigMap"]]
        for key in path:
            values = [(each or {}).get(key) for each in values]
        assert all(each == values[0] for each in values)
        return values[0]

    return read


def client(selector: str) -> Read:
    """Read the only label by which a selector finds those who may connect to the exporter."""

    def read(found: Found) -> Any:
        (policy,) = found["NetworkPolicy"]
        (rule,) = policy["spec"]["ingress"]
        (value,) = rule["from"][0][selector]["matchLabels"].values()
        return value

    return read


def update(field: str) -> Read:
    """Read a field of the strategy of updates."""
    return of("DaemonSet", "spec", "updateStrategy", field)


def metadata(field: str) -> Read:
    """Read a field of the pods' metadata."""
    return lambda found: template(found)["metadata"].get(field)


def label_case(name: str, kind: str) -> tuple[str, Values, Read, Any]:
    """Return the case of labels by which a Prometheus selects an object."""
    values = {name: {"enabled": True, "labels": {"release": "x"}}}
    return (f"{name}.labels", values, of(kind, "metadata", "labels", "release"), "x")


def monitor_cases(name: str, kind: str) -> list[tuple[str, Values, Read, Any]]:
    """Return the cases of a monitor."""
    kinds = {"DaemonSet", "Service", kind}
    fields = {"interval": "30s", "scrapeTimeout": "5s", "endpoint": {"basicAuth": AUTH}}
    values = {name: {"enabled": True, **fields}}
    return [
        (f"{name}.enabled", at(f"{name}.enabled", True), set, kinds),
        label_case(name, kind),
        (f"{name}.interval", values, endpoint(kind, "interval"), "30s"),
        (f"{name}.scrapeTimeout", values, endpoint(kind, "scrapeTimeout"), "5s"),
        (f"{name}.endpoint", values, endpoint(kind, "basicAuth"), AUTH),
    ]


def hidden(name: str) -> Read:
    """Read whether the variables of this name are hidden, which are alike on all dashboards."""

    def read(found: Mapping[str, list[Manifest]]) -> Any:
        (hide,) = {
            variable.get("hide")
            for config_map in found["ConfigMap"]
            for text in config_map["data"].values()
            for variable in json.loads(text)["templating"]["list"]
            if variable["name"] == name
        }
        return hide

    return read


ON = {name: {"enabled": True} for name in EVERYTHING}
PODS = at("podMonitor.enabled", True)
SERVICES = at("serviceMonitor.enabled", True)
RULES = at("prometheusRule.enabled", True)
BOARDS = at("dashboards.enabled", True)
POLICY = at("networkPolicy.enabled", True)
ALL_KINDS = {"DaemonSet", "Service", "PodMonitor", "PrometheusRule", "ConfigMap", "NetworkPolicy"}
RUN_DIRECTORY = {"/run/torchmem": "/run/torchmem"}
LOGS, KUBELET = "/var/log/containers", "/var/lib/kubelet/pod-resources"
ROOT = {"podSecurityContext": {"runAsUser": 0, "runAsGroup": 0}}
SECRET = [{"name": "registry"}]
TOLERATED = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
AFFINITY: Values = {"nodeAffinity": {}}
EGRESS: list[Values] = [{"to": [{"namespaceSelector": {}}]}]
TEXTS = {"summary", "description"}
REPOSITORY = IMAGE["repository"]
# The name of a value, the values that are set, what is read of the manifests, and what it is.
CASES: list[tuple[str, Values, Read, Any]] = [
    ("image.repository", at("image.repository", "r/x"), containers("image"), "r/x:v1"),
    ("image.tag", at("image.tag", "a1b2"), containers("image"), f"{REPOSITORY}:a1b2"),
    (
        "image.digest",
        {"image": {"digest": DIGEST, "tag": ""}},
        containers("image"),
        f"{REPOSITORY}@{DIGEST}",
    ),
    ("image.pullPolicy", {}, containers("imagePullPolicy"), None),
    ("image.pullPolicy", at("image.pullPolicy", "Never"), containers("imagePullPolicy"), "Never"),
    ("imagePullSecrets", {}, pod("imagePullSecrets"), None),
    ("imagePullSecrets", {"imagePullSecrets": SECRET}, pod("imagePullSecrets"), SECRET),
    ("nameOverride", ON, named(), {"torchmem-exporter"}),
    ("nameOverride", {**ON, "nameOverride": "gpus"}, named(), {"gpus"}),
    ("hostPID", {}, pod("hostPID"), True),
    ("hostPID", {"hostPID": False}, pod("hostPID"), None),
    ("runDirectory", {}, run_directory, {"/run/torchmem"}),
    ("runDirectory", {"runDirectory": "/run/other"}, run_directory, {"/run/other"}),
    ("podNames.enabled", {}, volumes, RUN_DIRECTORY),
    ("podNames.enabled", at("podNames.enabled", True), volumes, {**RUN_DIRECTORY, LOGS: LOGS}),
    (
        "podNames.kubeletSocket",
        {**at("podNames.kubeletSocket", True), **ROOT},
        volumes,
        {**RUN_DIRECTORY, KUBELET: KUBELET},
    ),
    ("extraArgs", {}, flags, []),
    ("extraArgs", {"extraArgs": ["--pcie-throughput"]}, flags, ["--pcie-throughput"]),
    (
        "extraEnv",
        {"extraEnv": [{"name": "X", "value": "y"}]},
        lambda found: environment(found).get("X"),
        "y",
    ),
    ("gpuNodesOnly", {}, pod("nodeSelector"), GPU_NODES),
    ("gpuNodesOnly", {"gpuNodesOnly": False}, pod("nodeSelector"), None),
    ("nodeSelector", {"nodeSelector": {}}, pod("nodeSelector"), GPU_NODES),
    ("nodeSelector", {"nodeSelector": None}, pod("nodeSelector"), GPU_NODES),
    ("nodeSelector", {"nodeSelector": {"a": "b"}}, pod("nodeSelector"), {**GPU_NODES, "a": "b"}),
    (
        "nodeSelector",
        {"gpuNodesOnly": False, "nodeSelector": {"a": "b"}},
        pod("nodeSelector"),
        {"a": "b"},
    ),
    ("tolerations", {}, pod("tolerations"), TOLERATED),
    ("tolerations", {"tolerations": []}, pod("tolerations"), None),
    ("affinity", {}, pod("affinity"), None),
    ("affinity", {"affinity": AFFINITY}, pod("affinity"), AFFINITY),
    ("runtimeClassName", {}, pod("runtimeClassName"), "nvidia"),
    ("runtimeClassName", {"runtimeClassName": ""}, pod("runtimeClassName"), None),
    ("priorityClassName", {}, pod("priorityClassName"), "system-node-critical"),
    ("priorityClassName", {"priorityClassName": ""}, pod("priorityClassName"), None),
    ("updateStrategy", {}, update("rollingUpdate"), {"maxUnavailable": "10%"}),
    ("updateStrategy", at("updateStrategy.type", "OnDelete"), update("type"), "OnDelete"),
    ("podAnnotations", {}, metadata("annotations"), None),
    ("podAnnotations", {"podAnnotations": {"a": "b"}}, metadata("annotations"), {"a": "b"}),
    (
        "podLabels",
        {"podLabels": {"a": "b"}},
        lambda found: metadata("labels")(found)["a"],
        "b",
    ),
    ("podSecurityContext", {}, owner, ("9847", "9847", 9847, True)),
    ("podSecurityContext", ROOT, owner, ("0", "0", 0, False)),
    (
        "resources",
        {},
        exporter("resources"),
        {"requests": {"cpu": "20m", "memory": "96Mi"}, "limits": {"memory": "512Mi"}},
    ),
    ("webConfig.existingSecret", {}, flags, []),
    (
        "webConfig.existingSecret",
        at("webConfig.existingSecret", "web"),
        flags,
        ["--web.config.file=/etc/torchmem/web.yml"],
    ),
    ("webConfig.tls", PODS, endpoint("PodMonitor", "scheme"), None),
    (
        "webConfig.tls",
        {**PODS, **at("webConfig.tls", True)},
        endpoint("PodMonitor", "scheme"),
        "https",
    ),
    (
        "webConfig.tls",
        {**SERVICES, **at("webConfig.tls", True)},
        endpoint("ServiceMonitor", "scheme"),
        "https",
    ),
    ("service.enabled", {}, of("Service", "spec", "clusterIP"), "None"),
    ("service.enabled", at("service.enabled", False), set, {"DaemonSet"}),
    (
        "service.enabled",
        {**at("service.enabled", False), **SERVICES},
        set,
        {"DaemonSet", "Service", "ServiceMonitor"},
    ),
    ("service.annotations", {}, of("Service", "metadata", "annotations"), None),
    (
        "service.annotations",
        at("service.annotations", {"prometheus.io/scrape": "true"}),
        of("Service", "metadata", "annotations"),
        {"prometheus.io/scrape": "true"},
    ),
    *(
        case
        for name, kind in (("podMonitor", "PodMonitor"), ("serviceMonitor", "ServiceMonitor"))
        for case in monitor_cases(name, kind)
    ),
    ("prometheusRule.enabled", ON, set, ALL_KINDS),
    ("prometheusRule.enabled", {}, set, {"DaemonSet", "Service"}),
    *(label_case("prometheusRule", "PrometheusRule"),),
    ("prometheusRule.thresholds", RULES, links, TEXTS),
    (
        "prometheusRule.thresholds",
        merged(RULES, at("prometheusRule.thresholds.runbooks_at", "https://docs.example.org")),
        links,
        TEXTS | {"runbook_url"},
    ),
    (
        "prometheusRule.thresholds",
        merged(RULES, at("prometheusRule.thresholds.dashboards_at", "https://grafana.example.org")),
        links,
        TEXTS | {"dashboard_url"},
    ),
    (
        "prometheusRule.thresholds",
        merged(PODS, at("prometheusRule.thresholds.exporter_job", "gpus")),
        lambda found: endpoint("PodMonitor", "relabelings")(found)[0]["replacement"],
        "gpus",
    ),
    ("dashboards.enabled", BOARDS, set, {"DaemonSet", "Service", "ConfigMap"}),
    ("dashboards.labels", BOARDS, board("labels", "grafana_dashboard"), "1"),
    (
        "dashboards.labels",
        merged(BOARDS, at("dashboards.labels", {"a": "b"})),
        board("labels", "grafana_dashboard"),
        None,
    ),
    ("dashboards.annotations", BOARDS, board("annotations"), None),
    (
        "dashboards.annotations",
        merged(BOARDS, at("dashboards.annotations", {"grafana_folder": "GPUs"})),
        board("annotations", "grafana_folder"),
        "GPUs",
    ),
    *(
        ("dashboards.show", merged(BOARDS, values), hidden(label), hide)
        for label in ("cluster", "namespace", "team", "user")
        for values, hide in (({}, 2), (at(f"dashboards.show.{label}", True), None))
    ),
    ("dashboards.namespace", BOARDS, board("namespace"), "monitoring"),
    (
        "dashboards.namespace",
        merged(BOARDS, at("dashboards.namespace", "grafana")),
        board("namespace"),
        "grafana",
    ),
    ("networkPolicy.enabled", POLICY, of("NetworkPolicy", "spec", "egress"), []),
    ("networkPolicy.prometheusNamespace", POLICY, client("namespaceSelector"), "monitoring"),
    (
        "networkPolicy.prometheusNamespace",
        merged(POLICY, at("networkPolicy.prometheusNamespace", "metrics")),
        client("namespaceSelector"),
        "metrics",
    ),
    ("networkPolicy.prometheusLabels", POLICY, client("podSelector"), "prometheus"),
    (
        "networkPolicy.prometheusLabels",
        merged(POLICY, at("networkPolicy.prometheusLabels", {"app": "thanos"})),
        client("podSelector"),
        "thanos",
    ),
    (
        "networkPolicy.egress",
        merged(POLICY, at("networkPolicy.egress", EGRESS)),
        of("NetworkPolicy", "spec", "egress"),
        EGRESS,
    ),
]


@pytest.mark.parametrize(("name", "values", "read", "expected"), CASES)
def test_a_value_does_what_its_comment_says(
    chart: Any, name: str, values: Values, read: Read, expected: Any
) -> None:
    """With a value, or without it, the manifests have what values.yaml says."""
    found = manifests(chart, merged({"image": IMAGE}, values))

    assert read(found) == expected, name


def test_every_value_has_a_case() -> None:
    """No value is left out above."""
    assert {".".join(path) for path in comments()} == {name for name, *_ in CASES}


def test_no_default_survives_in_a_map_of_labels() -> None:
    """Helm merges maps, so labels that a default had could not be removed by other labels."""
    for name, value in shipped().items():
        maps = {"nodeSelector": value} if name == "nodeSelector" else value
        for key, inner in maps.items() if isinstance(maps, Mapping) else ():
            assert not (re.search("(?i)labels|selector", key) and inner), f"{name}.{key}"


def test_the_documented_configurations_do_what_the_page_says(chart: Any) -> None:
    """Each set of typical values on the page has the effect that the comment above it names."""
    stack, pods, mig, locked, everywhere, some = (
        manifests(chart, values) for values in documented().values()
    )

    assert set(stack) == ALL_KINDS - {"NetworkPolicy"}
    assert links(stack) == TEXTS | {"runbook_url", "dashboard_url"}
    assert LOGS in volumes(pods)
    assert {LOGS, KUBELET} < set(volumes(mig))
    assert owner(mig)[2:] == (0, False)
    assert environment(mig)["NVIDIA_MIG_MONITOR_DEVICES"] == "all"
    assert pod("hostPID")(locked) is None
    assert endpoint("PodMonitor", "scheme")(locked) == "https"
    assert "NetworkPolicy" in locked
    assert [pod(field)(everywhere) for field in ("nodeSelector", "runtimeClassName")] == [None] * 2
    assert pod("nodeSelector")(some) == {**GPU_NODES, "pool": "training"}


def test_published_documentation_is_what_alerts_link_to(tmp_path: Path) -> None:
    """Once the project has a site, alerts link to its runbooks, and no value is needed.

    The chart contains the shipped thresholds, where deploy/urls.py writes the address.
    """
    copy = shutil.copytree(CHART, tmp_path / "torchmem")
    thresholds = copy / "thresholds.yml"
    text = thresholds.read_text().replace(LOCAL_RUNBOOKS, "https://docs.example.org/runbooks")
    thresholds.write_text(text)
    with helm.Chart.load(copy) as chart:
        found = manifests(chart, {**RULES, **BOARDS})
    boards = json.dumps(found["ConfigMap"])

    assert links(found) == TEXTS | {"runbook_url"}
    assert "https://docs.example.org/runbooks/${__value.raw}.md" in boards
    assert LOCAL_RUNBOOKS not in boards


def test_the_notes_say_what_is_missing(chart: Any) -> None:
    """After an installation, Helm prints that alerts are off, or which links they lack."""
    missing, complete = (
        rendered(chart, values)["torchmem/templates/NOTES.txt"]
        for values in (RULES, documented()["kube-prometheus-stack and Grafana's sidecar"])
    )

    assert "set prometheusRule.enabled=true" in rendered(chart, {})["torchmem/templates/NOTES.txt"]
    assert "no links to runbooks: set prometheusRule.thresholds.runbooks_at" in missing
    assert "no links to dashboards: set prometheusRule.thresholds.dashboards_at" in missing
    assert "no links" not in complete
