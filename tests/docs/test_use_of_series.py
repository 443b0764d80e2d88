"""Every series of torchmem has a use: an alert, a rule, a panel, or a sentence for users."""

from __future__ import annotations

import re
from functools import cache

import pytest
from support.dashboards import QUERIES, filled_in
from support.promql import ROOT, rules, selectors

from torchmem.metrics.catalog import CATALOG

# The reference lists every metric, and the lists of docs/scaling.md those without a use.
NO_USE = {"metrics.md", "scaling.md"}
_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_SUFFIX = re.compile(r"_(bucket|sum|count|gsum|gcount)$")


def _names(texts: list[str]) -> set[str]:
    return {name for text in texts for name in _NAME.findall(text)}


@cache
def documented() -> set[str]:
    """Return the series named on pages for users, runbooks included."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in NO_USE]
    return _names([page.read_text() for page in [ROOT / "README.md", *pages]])


@cache
def read() -> set[str]:
    """Return the series that a rule, the text of an alert, or a panel reads."""
    every = [rule for kind in ("record", "alert") for rule in rules(kind)]
    queries = [*map(filled_in, QUERIES.values()), *(rule["expr"] for rule in every)]
    in_texts = _names([text for rule in every for text in rule.get("annotations", {}).values()])
    return in_texts | {name for query in queries for name, _ in selectors(query)}


@pytest.mark.parametrize("name", sorted({rule["record"] for rule in rules("record")}))
def test_every_recording_rule_is_read(name: str) -> None:
    """An alert, another rule, a panel or a page of the documentation reads each recorded series."""
    assert name in read() | documented() | cluster_series()


def cluster_series() -> set[str]:
    """Return the series for federation that docs/scaling.md lists."""
    page = (ROOT / "docs" / "scaling.md").read_text()
    return {name for name in _names([page]) if name.startswith("cluster:")}


@pytest.mark.parametrize("name", CATALOG)
def test_every_metric_has_a_use(name: str) -> None:
    """Each metric is in a panel, in a rule, or on a page other than the reference."""
    assert name in {_SUFFIX.sub("", used) for used in read()} | read() | documented()


def test_only_pages_name_what_the_exporter_leaves_out() -> None:
    """No rule, no text of an alert and no panel reads a metric that needs `--all-series`."""
    used = read() | {_SUFFIX.sub("", name) for name in read()}

    assert sorted(name for name, spec in CATALOG.items() if spec.is_detail and name in used) == []
