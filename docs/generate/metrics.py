"""docs/metrics.md, generated from the catalog by `make generate`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from docs.generate import rank_series

from torchmem.metrics.catalog import CATALOG, MetricSpec

PAGE = Path(__file__).resolve().parents[1] / "metrics.md"
HEAD = """# Metrics reference

Every metric with its kind, its labels in braces beside those of its group, and its meaning. The
unit is in the name; ratios range from 0 to 1. An unknown value is absent: it is never 0, NaN or −1.
In PromQL, query a gauge histogram by its `_bucket` series and an info metric by its name; the value
of an info metric is always 1. Metrics with an asterisk need [`--all-series`](#series-of-a-rank).
"""


def rendered() -> dict[Path, str]:
    """Return the page: one table for each group of metrics, and the number of series of a rank."""
    return {PAGE: f"{HEAD}\n{_tables()}\n\n{rank_series.section()}"}


def _tables() -> str:
    groups = groupby(CATALOG.values(), key=lambda spec: spec.group)
    return "\n\n".join(_group(name, list(specs)) for name, specs in groups)


def _group(name: str, specs: list[MetricSpec]) -> str:
    shared = [label for label in specs[0].labels if all(label in spec.labels for spec in specs)]
    rows = [f"| {_name(spec, shared)} | {spec.kind} | {spec.help} |" for spec in specs]
    labels = [f"Labels: {', '.join(shared)}.\n"] if shared else []
    return "\n".join(
        [f"## {name}\n", *labels, "| metric | kind | meaning |", "|---|---|---|", *rows]
    )


def _name(spec: MetricSpec, shared: list[str]) -> str:
    own = ",".join(label for label in spec.labels if label not in shared)
    return f"`{spec.name}{f'{{{own}}}' if own else ''}`{'*' if spec.is_detail else ''}"
