"""The simulator is PyTorch's allocator: both run the same random programs, and are compared after every operation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.allocator_programs import SETTINGS
from support.on_phantom import on_phantom

pytestmark = pytest.mark.allocator

SCRIPT = str(Path(__file__).with_name("differential.py"))
OPERATIONS = 10_000


@pytest.mark.parametrize("name", SETTINGS)
def test_the_simulator_does_what_pytorch_does(name: str, tmp_path: Path) -> None:
    """Addresses, statistics, layout, driver memory and errors agree in a random program that runs out of memory."""
    done = on_phantom(tmp_path, SCRIPT, name, str(OPERATIONS), "0")

    assert 0 == done.returncode, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert [] == result["differences"]
    assert OPERATIONS == result["operations"]
    assert result["num_ooms"] >= 10
    assert result["num_device_free"] >= 40
    assert result["num_oom_rejections"] >= 10 or name != "rejections"
