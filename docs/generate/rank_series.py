"""The section of docs/metrics.md on how many series one rank has."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchmem.metrics.catalog import CATALOG
from torchmem.metrics.families import ProcessView, families

ROOT = Path(__file__).resolve().parents[2]
UUID = "GPU-0a7c03e1-5f42-9d08-b3c6-0d41e80f2a90"
SECTION = """## Series of a rank

A rank with one GPU of which everything is known has {default} series with its process on the GPU;
most ranks have fewer. With `--all-series` (`all_series: true` in the exporter's file) it has {all}:
the metrics with an asterisk, the active bytes by pool, all components of the peak, and all buckets
of the histograms, which no alert, recording rule or panel reads. `torchmem why` and the live page
show their values, too. A rank's own endpoint and its textfile always have all series.
"""
_SUFFIX = re.compile(r"_(bucket|sum|count|gsum|gcount)$")


def section() -> str:
    """Return the section of the page."""
    default, everything = series()
    return SECTION.format(default=default.total(), all=everything.total())


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
