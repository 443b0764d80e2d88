"""The table in docs/metrics.md: the series of one rank, by metric, and who reads them."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torchmem.metrics.catalog import CATALOG
from torchmem.metrics.families import ProcessView, families

ROOT = Path(__file__).resolve().parents[2]
UUID = "GPU-0a7c03e1-5f42-9d08-b3c6-0d41e80f2a90"
TITLES = {
    "training-memory": "Training memory",
    "node": "GPU node",
    "oom": "After an OOM",
    "fleet": "Fleet",
    "self": "torchmem itself",
}
HEAD = """## Series of a rank

A rank with one GPU of which everything is known has {default} series with its process on the GPU,
and {all} with [`--all-series`](exporter.md#all-series): the difference is what no alert, no
recording rule and no panel reads. Most ranks have fewer. The values are also in `torchmem why`,
on the live page, and in its [API](screens.md#the-api).

| metric | series | with `--all-series` | who reads it |
|---|---|---|---|
"""
_SUFFIX = re.compile(r"_(bucket|sum|count|gsum|gcount)$")
_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_UNREAD_PAGES = {"metrics.md", "fleet.md"}


def section() -> str:
    """Return the section of the page."""
    default, everything = series()
    rows = [
        f"| `{name}` | {default[name] or '–'} | {everything[name]} | {', '.join(readers()[name])} |"
        for name in CATALOG
        if everything[name]
    ]
    totals = {"default": default.total(), "all": everything.total()}
    return HEAD.format(**totals) + "\n".join(rows)


@cache
def series() -> tuple[Counter[str], Counter[str]]:
    """Return the series of a rank by metric: those by default, and all."""
    with _tests():
        from support.h100_node import h100_node
        from support.samples import full_sample

        pages = []
        for ranks in (1, 0):
            with h100_node([UUID], ranks) as node:
                pages.append(Counter(_names(node.page(1.0))))
    default = pages[0] - pages[1]
    view = ProcessView(full_sample(), 1, "running", {})
    details = Counter(_metric(row.name) for item in families([view]) for row in item.samples)
    missing = Counter(name for name, spec in CATALOG.items() if spec.is_detail) - details
    return default, default | details | +missing


def _names(page: str) -> Iterator[str]:
    lines = (line for line in page.splitlines() if not line.startswith("#"))
    own = (line for line in lines if "collector_duration" not in line)
    return (_metric(re.split(r"[{ ]", line)[0]) for line in own)


@cache
def readers() -> Mapping[str, list[str]]:
    """Return who reads each metric: alerts, recording rules, panels, else pages."""
    with _tests():
        from support.dashboards import QUERIES, filled_in
        from support.promql import rules, selectors

    found: dict[str, Counter[str]] = defaultdict(Counter)
    for rule in rules("alert"):
        texts = " ".join(rule.get("annotations", {}).values())
        for name in {name for name, _ in selectors(rule["expr"])} | {*_NAME.findall(texts)}:
            found[_metric(name)][f"alert {rule['alert']}"] += 1
    for rule in rules("record"):
        for name in {name for name, _ in selectors(rule["expr"])}:
            found[_metric(name)]["recording rules"] += 1
    for query, text in QUERIES.items():
        board = TITLES.get(query.partition(":")[0], query.partition(":")[0])
        for name in {name for name, _ in selectors(filled_in(text))}:
            found[_metric(name)][f"dashboard {board}"] += 1
    return {name: list(_in_words(found[name])) or list(_pages(name)) for name in CATALOG}


def _in_words(counts: Counter[str]) -> Iterator[str]:
    alerts = [name.removeprefix("alert ") for name in counts if name.startswith("alert ")]
    boards = [name.removeprefix("dashboard ") for name in counts if name.startswith("dash")]
    yield from (f"[{name}](runbooks/{name}.md)" for name in sorted(alerts))
    if counts["recording rules"]:
        yield f"recording rules ({counts['recording rules']})"
    yield from (f"*{name}*" for name in sorted(boards))


def _pages(name: str) -> Iterable[str]:
    docs = ROOT / "docs"
    for page in sorted(docs.rglob("*.md")):
        if page.name not in _UNREAD_PAGES and name in _NAME.findall(page.read_text()):
            yield f"[{page.stem}]({page.relative_to(docs)})"


def _metric(name: str) -> str:
    return name if name in CATALOG else _SUFFIX.sub("", name)


@contextmanager
def _tests() -> Iterator[None]:
    """Make the modules of the tests importable."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT / "tests"))
