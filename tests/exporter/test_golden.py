"""Whole scrapes of the exporter process on the fake NVML; record_goldens.py records them."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from support import promtool
from support.golden_scrapes import GOLDEN, NAMES, portable, scrape_of


@pytest.mark.parametrize("name", NAMES)
def test_scrape_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    """On this node the exporter serves exactly what was recorded and reviewed."""
    golden = portable((GOLDEN / f"{name}.metrics").read_text()).splitlines(keepends=True)
    shown = portable(scrape_of(name, tmp_path)).splitlines(keepends=True)
    difference = "".join(difflib.unified_diff(golden, shown, "golden", "now", n=0))

    assert not difference, f"if intended, run tests/exporter/record_goldens.py:\n{difference}"


@pytest.mark.stack
@pytest.mark.parametrize("name", NAMES)
def test_promtool_accepts_the_scrape(name: str) -> None:
    """`promtool check metrics` accepts names, types, help texts and labels."""
    golden = (GOLDEN / f"{name}.metrics").read_text()
    checked = promtool.run("check", "metrics", input=golden)

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
