"""The snippets of docs/scaling.md: what to send to a store, and what to drop."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from support import promtool
from support.dashboards import BOARDS, QUERIES, filled_in
from support.h100_node import h100_node
from support.promql import ROOT, rules, selectors

from torchmem.metrics.catalog import CATALOG

PAGE = (ROOT / "docs" / "scaling.md").read_text()
SNIPPETS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
UNREAD, DETAIL = (
    relabel["regex"]
    for text in SNIPPETS
    for scrape in yaml.safe_load(text).get("scrape_configs", [])
    for relabel in scrape.get("metric_relabel_configs", [])
)
UUIDS = [f"GPU-0a7c03e1-5f42-9d08-b3c6-0d41e80f2a9{index}" for index in range(8)]
_SUFFIX = re.compile(r"_(bucket|sum|count|gsum|gcount)$")


def read(dashboards: str) -> set[str]:
    """Return the series that the rules and the dashboards matching a pattern read."""
    texts = [
        filled_in(text)
        for name, text in QUERIES.items()
        if re.fullmatch(dashboards, name.partition(":")[0])
    ]
    texts += [rule["expr"] for kind in ("record", "alert") for rule in rules(kind)]
    return {name for text in texts for name, _ in selectors(text)}


def names() -> list[str]:
    """Return the metric name of each series of a node with 8 GPUs and 8 ranks without engines."""
    with h100_node(UUIDS, len(UUIDS)) as node:
        return [
            re.split(r"[{ ]", line)[0]
            for line in node.page(1.0).splitlines()
            if not line.startswith(("#", "torchmem_engine_", "torchmem_reserved_unbacked_"))
        ]


def test_the_first_list_drops_only_unread_series() -> None:
    """No rule and no dashboard reads a series that the first list drops."""
    assert sorted(name for name in read(".*") if re.fullmatch(UNREAD, name)) == []


def test_the_second_list_drops_only_details() -> None:
    """No rule, and no panel of Fleet, After an OOM or torchmem itself, reads what it drops."""
    assert sorted(name for name in read("fleet|oom|self") if re.fullmatch(DETAIL, name)) == []


def test_the_shares_on_the_page_are_right() -> None:
    """Each list drops about the share that the page states (5 points), and names real metrics."""
    all_names = names()
    shares = [
        sum(bool(re.fullmatch(pattern, name)) for name in all_names) / len(all_names)
        for pattern in (UNREAD, DETAIL)
    ]
    stated = re.search(
        r"first list drops about (\d+)%.* second drops about (\d+)%", " ".join(PAGE.split())
    )
    assert stated
    assert [100 * share for share in shares] == pytest.approx(
        [int(stated[1]), int(stated[2])], abs=5
    )
    for pattern in (UNREAD, DETAIL):
        for name in _alternatives(pattern):
            assert name in CATALOG or _SUFFIX.sub("", name) in CATALOG, name


def _alternatives(text: str) -> list[str]:
    """Return the names that a pattern of the form PREFIX(A|B)|PREFIX(C) matches."""
    return [
        prefix + name
        for prefix, inside in re.findall(r"(\w+)\(([^()]*)\)", text)
        for name in inside.split("|")
    ]


@pytest.mark.stack
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_prometheus_accepts_the_snippets(tmp_path: Path, snippet: str) -> None:
    """promtool accepts each YAML snippet of the page as a configuration."""
    (tmp_path / "prometheus.yml").write_text(snippet)
    promtool.accepts("check", "config", tmp_path / "prometheus.yml")


def test_remote_write_keeps_what_fleet_reads() -> None:
    """The remote write filter of the page keeps every series that the dashboard Fleet reads."""
    (relabel,) = [
        each
        for text in SNIPPETS
        for store in yaml.safe_load(text).get("remote_write", [])
        for each in store.get("write_relabel_configs", [])
    ]
    texts = [
        filled_in(text, span="5m") for name, text in QUERIES.items() if name.startswith("fleet:")
    ]
    read_names = {name for text in texts for name, _ in selectors(text)} | _names_in_variables()
    assert sorted(name for name in read_names if not re.fullmatch(relabel["regex"], name)) == []


def _names_in_variables() -> set[str]:
    """Return the metrics that the variables of the dashboard read."""
    texts = [str(choice.get("query")) for choice in BOARDS["fleet"]["templating"]["list"]]
    return {
        name for text in texts for name in re.findall(r"[\w:]*\b(?:nvml|torchmem)_[\w:]+", text)
    }
