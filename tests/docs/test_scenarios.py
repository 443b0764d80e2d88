"""The page of the scenarios says what the scenarios say of themselves."""

from __future__ import annotations

import re
from pathlib import Path

from torchmem.simulator.scenarios import SCENARIOS


def test_every_scenario_has_its_row(root: Path) -> None:
    """Name, story, number and source of each scenario, in the order of `torchmem demo --list`."""
    page = (root / "docs" / "scenarios.md").read_text()
    rows = re.findall(
        r"^\| `([\w-]+)` \| (.+?) \| (.+?) \| (.+?) \| .+ \| .+ \|$", page, re.MULTILINE
    )

    assert [(s.name, s.summary, s.reproduces, s.source) for s in SCENARIOS.values()] == rows
