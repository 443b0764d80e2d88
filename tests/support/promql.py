"""The series that shipped PromQL may use: those of the catalog and of the recording rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from dashboards.recorded import ENGINES_OWN

from torchmem.metrics.catalog import CATALOG, DEVICE, MetricSpec

ROOT = Path(__file__).resolve().parents[2]
RULES = sorted((ROOT / "prometheus" / "rules").glob("*.yml"))
TARGET_LABELS = {"job", "instance"}
# An external label of each Prometheus: every series of a store may have it.
EXTERNAL_LABELS = {"cluster"}
# Series that Prometheus itself adds for every scrape and every alert.
BUILT_IN = {
    "up": TARGET_LABELS,
    "scrape_duration_seconds": TARGET_LABELS,
    "scrape_samples_scraped": TARGET_LABELS,
    "ALERTS": {"alertname", "alertstate", "severity", "cause", *TARGET_LABELS, *DEVICE},
    # Of OpenCost, which has the labels of each node.
    "node_cpu_hourly_cost": {"node", "instance_type", "region", "provider_id", "arch"},
    "ALERTS_FOR_STATE": {"alertname", "severity", *TARGET_LABELS, *DEVICE},
}
HOLDERS = {"slurm_job_id", "user", "account", "pod", "namespace", "container"}
# Labels of info metrics that shipped PromQL may use. A process or driver sets those it knows.
FACTS = {
    "torchmem_allocator_info": {
        "expandable_segments",
        "max_split_size",
        "garbage_collection_threshold",
        "pytorch_cuda_alloc_conf",
    },
    "torchmem_last_oom_info": {"cause", "line", "function", "onset", "remedy"},
    "torchmem_process_info": {"advice", "slurm_job_id", "pod", "namespace"},
    "torchmem_threat_info": {"component", "remedy"},
    "torchmem_exporter_build_info": {"version", "python_version"},
    "nvml_driver_info": {"driver_version", "nvml_version", "cuda_version", "platform"},
    "nvml_gpu_info": {"name", "pci_bus_id"},
    "nvml_mig_info": {"mig_uuid", "profile"},
    "nvml_gpu_assignment_info": HOLDERS,
    "nvml_mig_assignment_info": HOLDERS,
    "nvml_process_info": {
        *("name", "uid", "user", "rank", "run", "launch", "slurm_job_id", "state"),
        *("namespace", "pod", "pod_uid"),
    },
}
SUFFIXES = {
    "histogram": ("_bucket", "_sum", "_count"),
    "gaugehistogram": ("_bucket", "_gsum", "_gcount"),
}


@cache
def rules(kind: str) -> list[dict[str, Any]]:
    """Return all shipped rules of one kind, `record` or `alert`."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


@cache
def series() -> dict[str, set[str]]:
    """Return every series that exists, with its labels."""
    known = {name: set(labels) for name, labels in BUILT_IN.items()}
    known |= {spec.name: set(spec.labels) for spec in ENGINES_OWN}
    for spec in CATALOG.values():
        known |= _scraped(spec)
    # Twice, because rules read those of files whose names come later.
    for rule in 2 * rules("record"):
        labels = _result_labels(promql_parser.parse(rule["expr"]), known)
        known.setdefault(rule["record"], set()).update(labels, rule.get("labels", {}))
    return known


def _scraped(spec: MetricSpec) -> dict[str, set[str]]:
    labels = TARGET_LABELS | set(spec.labels) | FACTS.get(spec.name, set())
    suffixes = SUFFIXES.get(spec.kind, ("",))
    return {
        spec.name + suffix: labels | ({"le"} if suffix == "_bucket" else set())
        for suffix in suffixes
    }


def _result_labels(node: Any, known: dict[str, set[str]]) -> set[str]:
    """Return the labels of an expression's result; an upper bound for joined series."""
    if isinstance(node, promql_parser.VectorSelector):
        return known.get(node.name or "", set())
    labels = set().union(*(_result_labels(child, known) for child in children(node)))
    if not isinstance(node, promql_parser.AggregateExpr):
        return labels
    if node.modifier is None:
        return set()
    grouped = set(node.modifier.labels)
    by = node.modifier.type == promql_parser.AggModifierType.By
    return grouped if by else labels - grouped


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Return name and matched labels of every selector in an expression."""
    return [
        (node.name or "", {matcher.name for matcher in node.matchers.matchers})
        for node in nodes(promql_parser.parse(expression))
        if isinstance(node, promql_parser.VectorSelector)
    ]


def grouping_labels(expression: str) -> set[str]:
    """Return the labels by which an expression aggregates or joins."""
    labels: set[str] = set()
    for node in nodes(promql_parser.parse(expression)):
        modifier = getattr(node, "modifier", None)
        matching = getattr(modifier, "matching", modifier)
        labels.update(getattr(matching, "labels", []))
        labels.update(getattr(modifier, "group_labels", None) or [])
    return labels


def _made_labels(expression: str) -> set[str]:
    """Return the labels that label_replace and label_join add."""
    calls = [
        node
        for node in nodes(promql_parser.parse(expression))
        if isinstance(node, promql_parser.Call) and node.func.name.startswith("label_")
    ]
    return {call.args[1].val for call in calls}


def problems(expression: str) -> list[str]:
    """Return a message for each name and label in an expression that no series has."""
    known, messages = series(), []
    available: set[str] = set()
    for name, labels in selectors(expression):
        if name not in known:
            messages.append(f"no series {name}")
            continue
        available |= known[name]
        unknown = labels - known[name] - EXTERNAL_LABELS
        messages += [f"{name} has no label {label}" for label in sorted(unknown)]
    unmade = grouping_labels(expression) - available - _made_labels(expression)
    return messages + [f"nothing here has a label {label}" for label in sorted(unmade)]


def nodes(node: Any) -> Iterator[Any]:
    """Yield a node of the syntax tree and all below it."""
    yield node
    for child in children(node):
        yield from nodes(child)


def children(node: Any) -> list[Any]:
    """Return what is directly below a node of the syntax tree."""
    names = ("expr", "lhs", "rhs", "vector_selector", "param")
    found = [getattr(node, name, None) for name in names] + [*getattr(node, "args", ())]
    return [child for child in found if child is not None and not isinstance(child, str)]
