"""The simulator compared with traces of PyTorch's own allocator (golden/record.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.allocator_programs import SETTINGS
from support.traces import load, replay

GOLDEN = Path(__file__).with_name("golden")


def test_every_setting_has_a_trace() -> None:
    """Exactly the settings of the differential test are recorded."""
    assert sorted(SETTINGS) == sorted(
        path.name.removesuffix(".json.xz") for path in GOLDEN.glob("*.json.xz")
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_the_simulator_does_what_pytorch_did(name: str) -> None:
    """Every address, statistic, block, free byte and error equals the recorded one."""
    trace = load(GOLDEN / f"{name}.json.xz")
    checks = replay(name, trace)
    assert trace["refused"] == checks.refused
    assert trace["digests"] == checks.digests
    assert checks.refused
