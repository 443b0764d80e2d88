#!/usr/bin/env python3
"""Record tests/exporter/golden, all nodes or those named; review the difference before a commit."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.golden_scrapes import GOLDEN, NAMES, scrape_of


def main(names: list[str]) -> None:
    """Record the nodes."""
    GOLDEN.mkdir(exist_ok=True)
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            (GOLDEN / f"{name}.metrics").write_text(scrape_of(name, Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
