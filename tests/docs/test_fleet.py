"""The configuration that docs/fleet.md gives for large fleets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from support.dashboards import QUERIES, filled_in
from support.h100_node import h100_node
from support.promql import ROOT, rules, selectors

from torchmem.sample.catalog import CATALOG

PAGE = (ROOT / "docs" / "fleet.md").read_text()
SNIPPETS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
UNREAD, DETAIL = (
    relabel["regex"]
    for text in SNIPPETS
    for scrape in yaml.safe_load(text)["scrape_configs"]
    for relabel in scrape.get("metric_relabel_configs", [])
)
UUIDS = [f"GPU-0a7c03e1-5f42-9d08-b3c6-0d41e80f2a9{index}" for index in range(8)]
_SUFFIX = re.compile(r"_(bucket|sum|count|gsum|gcount)$")


def read(dashboards: str) -> set[str]:
    """Series that the rules, and the dashboards of these names, read."""
    texts = [
        filled_in(text)
        for name, text in QUERIES.items()
        if re.fullmatch(dashboards, name.partition(":")[0])
    ]
    texts += [rule["expr"] for kind in ("record", "alert") for rule in rules(kind)]
    return {name for text in texts for name, _ in selectors(text)}


def names() -> list[str]:
    """The name of each series of a node with 8 GPUs and 8 ranks."""
    with h100_node(UUIDS, len(UUIDS)) as node:
        return [
            re.split(r"[{ ]", line)[0]
            for line in node.page(1.0).splitlines()
            if not line.startswith("#")
        ]


def test_nobody_misses_what_nothing_shipped_reads() -> None:
    """The first list of families to drop names only such as no rule and no dashboard reads."""
    assert [] == sorted(name for name in read(".*") if re.fullmatch(UNREAD, name))


def test_only_details_of_two_dashboards_are_lost() -> None:
    """The second list costs no rule, and no panel of Fleet, After an OOM or torchmem itself."""
    assert [] == sorted(name for name in read("fleet|oom|self") if re.fullmatch(DETAIL, name))


def test_the_lists_drop_what_the_page_says() -> None:
    """The share of a node's series that each list drops is the one on the page, and every name in them exists."""
    all_names = names()
    shares = [
        sum(bool(re.fullmatch(list_, name)) for name in all_names) / len(all_names)
        for list_ in (UNREAD, DETAIL)
    ]
    said = re.search(r"first list drops (\d+) %.* second (\d+) %", PAGE, re.DOTALL)
    assert said
    assert [round(100 * share) for share in shares] == [int(said[1]), int(said[2])]
    for list_ in (UNREAD, DETAIL):
        for name in _alternatives(list_):
            assert name in CATALOG or _SUFFIX.sub("", name) in CATALOG, name


def _alternatives(text: str) -> list[str]:
    """The names that a pattern of the form PREFIX(A|B)|PREFIX(C) stands for."""
    return [
        prefix + name
        for prefix, inside in re.findall(r"(\w+)\(([^()]*)\)", text)
        for name in inside.split("|")
    ]


@pytest.mark.stack
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_prometheus_accepts_the_snippets(tmp_path: Path, snippet: str) -> None:
    """Each piece of configuration on the page is one that Prometheus loads."""
    (tmp_path / "prometheus.yml").write_text(snippet)
    checked = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
