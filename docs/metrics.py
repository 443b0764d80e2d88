"""Write docs/metrics.md from the catalogue: `python docs/metrics.py [--check]`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from torchmem.sample.catalog import CATALOG, MetricSpec

PAGE = Path(__file__).resolve().parent / "metrics.md"
HEAD = """# Every metric

Written by `make docs` from the catalogue, `sdk/src/torchmem/sample/catalog.py`. Base units; ratios from 0 to 1. A value
that is not known is not there: never 0, NaN or −1. In PromQL a gauge histogram is read by its `_bucket` series, and an
info metric by its name with a 1 as value.
"""


def table() -> str:
    """The catalogue as Markdown, one table for each group."""
    groups = groupby(CATALOG.values(), key=lambda spec: spec.group)
    return "\n\n".join(_group(name, list(specs)) for name, specs in groups)


def _group(name: str, specs: list[MetricSpec]) -> str:
    rows = [
        f"| `{spec.name}` | {spec.kind} | {', '.join(spec.labels) or '–'} | {spec.help} |"
        for spec in specs
    ]
    return "\n".join(
        [f"## {name}\n", "| metric | kind | labels | meaning |", "|---|---|---|---|", *rows]
    )


def main(arguments: list[str]) -> int:
    """Write the page, or with --check compare only; returns the exit code."""
    current, wanted = PAGE.read_text(), f"{HEAD}\n{table()}\n"
    if "--check" in arguments:
        if current != wanted:
            print("docs/metrics.md is out of date; run make docs", file=sys.stderr)
        return int(current != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
