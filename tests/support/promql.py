"""What the shipped PromQL may name: the series of the catalogue and of the recording rules, with their labels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from torchmem.sample.catalog import CATALOG, DEVICE, MetricSpec

ROOT = Path(__file__).resolve().parents[2]
RULES = sorted((ROOT / "prometheus" / "rules").glob("*.yml"))
TARGET_LABELS = {"job", "instance"}
# What Prometheus itself adds to every scrape and every alert.
OWN = {
    "up": TARGET_LABELS,
    "scrape_duration_seconds": TARGET_LABELS,
    "scrape_samples_scraped": TARGET_LABELS,
    "ALERTS": {"alertname", "alertstate", "severity", *TARGET_LABELS, *DEVICE},
    "ALERTS_FOR_STATE": {"alertname", "severity", *TARGET_LABELS, *DEVICE},
}
# The facts of info metrics that shipped PromQL may name; each process or driver gives those that it knows.
FACTS = {
    "torchmem_allocator_info": {
        "expandable_segments", "max_split_size", "garbage_collection_threshold", "pytorch_cuda_alloc_conf",
    },
    "torchmem_exporter_build_info": {"version", "python_version"},
    "nvml_driver_info": {"driver_version", "nvml_version", "cuda_version"},
    "nvml_gpu_info": {"name", "pci_bus_id"},
    "nvml_mig_info": {"mig_uuid", "profile"},
    "nvml_process_info": {"name", "user", "rank", "run", "slurm_job_id", "pod_uid"},
}  # fmt: skip
SUFFIXES = {
    "histogram": ("_bucket", "_sum", "_count"),
    "gaugehistogram": ("_bucket", "_gsum", "_gcount"),
}


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules of the shipped files of one kind, `record` or `alert`."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


@cache
def series() -> dict[str, set[str]]:
    """Every series that exists, with its labels."""
    known = {name: set(labels) for name, labels in OWN.items()}
    for spec in CATALOG.values():
        known |= _scraped(spec)
    for rule in rules("record"):
        labels = _result_labels(promql_parser.parse(rule["expr"]), known) | set(
            rule.get("labels", {})
        )
        known[rule["record"]] = known.get(rule["record"], set()) | labels
    return known


def _scraped(spec: MetricSpec) -> dict[str, set[str]]:
    labels = TARGET_LABELS | set(spec.labels) | FACTS.get(spec.name, set())
    suffixes = SUFFIXES.get(spec.kind, ("",))
    return {
        spec.name + suffix: labels | ({"le"} if suffix == "_bucket" else set())
        for suffix in suffixes
    }


def _result_labels(node: Any, known: dict[str, set[str]]) -> set[str]:
    """Labels that an expression's result can have; an upper bound where series are joined."""
    if isinstance(node, promql_parser.VectorSelector):
        return known.get(node.name or "", set())
    labels = set().union(*(_result_labels(child, known) for child in _children(node)))
    if isinstance(node, promql_parser.AggregateExpr):
        if node.modifier is None:
            return set()
        grouped = set(node.modifier.labels)
        return (
            grouped if node.modifier.type == promql_parser.AggModifierType.By else labels - grouped
        )
    return labels


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Name and matched labels of every selector in an expression."""
    found = (
        node
        for node in _nodes(promql_parser.parse(expression))
        if isinstance(node, promql_parser.VectorSelector)
    )
    return [
        (node.name or "", {matcher.name for matcher in node.matchers.matchers}) for node in found
    ]


def grouping_labels(expression: str) -> set[str]:
    """Labels that an expression aggregates or joins by."""
    labels: set[str] = set()
    for node in _nodes(promql_parser.parse(expression)):
        modifier = getattr(node, "modifier", None)
        matching = getattr(modifier, "matching", modifier)
        labels |= set(getattr(matching, "labels", [])) | set(
            getattr(modifier, "group_labels", None) or []
        )
    return labels


def complaints(expression: str) -> list[str]:
    """Names and labels in an expression that no series has."""
    known, wrong = series(), []
    for name, labels in selectors(expression):
        if name not in known:
            wrong.append(f"no series {name}")
        else:
            wrong += [f"{name} has no label {label}" for label in sorted(labels - known[name])]
    labels_at_hand = set().union(*(known.get(name, set()) for name, _ in selectors(expression)))
    return wrong + [
        f"nothing here has a label {label}"
        for label in sorted(grouping_labels(expression) - labels_at_hand)
    ]


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in _children(node):
        yield from _nodes(child)


def _children(node: Any) -> list[Any]:
    named = [
        getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "param")
    ]
    return [
        child
        for child in (*named, *getattr(node, "args", ()))
        if child is not None and not isinstance(child, str)
    ]
