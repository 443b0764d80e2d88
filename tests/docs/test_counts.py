"""Numbers of alerts, rules, dashboards and scenarios change; no page states them by hand."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"(?:\d+|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|twenty)"
COUNTED = r"(?:alerts?|alert rules|recording rules|dashboards|scenarios|runbooks)"
COUNT = re.compile(rf"\b{NUMBER} {COUNTED}\b|\| {COUNTED} \| \d+ \|", re.IGNORECASE)


def test_no_page_counts_what_the_product_ships() -> None:
    """A count goes out of date with the next alert or scenario."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {
        str(page.relative_to(ROOT)): COUNT.findall(page.read_text())
        for page in pages
        if COUNT.search(page.read_text())
    }

    assert found == {}
