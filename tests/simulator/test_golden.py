"""The simulator against traces recorded from PyTorch's own allocator (golden/record.py), in every setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.allocator_programs import SETTINGS
from support.traces import load, replay

GOLDEN = Path(__file__).with_name("golden")


def test_every_setting_has_a_trace() -> None:
    """Each setting of the differential test is recorded, and nothing else."""
    assert sorted(SETTINGS) == sorted(
        path.name.removesuffix(".json.xz") for path in GOLDEN.glob("*.json.xz")
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_the_simulator_repeats_pytorch(name: str) -> None:
    """Every address, statistic, block, free byte and error of the recorded program comes out again."""
    trace = load(GOLDEN / f"{name}.json.xz")
    checks = replay(name, trace)
    assert trace["refused"] == checks.refused
    assert trace["digests"] == checks.digests
    assert checks.refused
