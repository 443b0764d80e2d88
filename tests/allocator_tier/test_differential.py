"""The simulator equals PyTorch's allocator: both run the same random programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.allocator_programs import SETTINGS
from support.phantom import run_on_phantom

pytestmark = pytest.mark.allocator

SCRIPT = Path(__file__).with_name("differential.py")
OPERATIONS = 10_000


@pytest.mark.parametrize("name", SETTINGS)
def test_the_simulator_does_what_pytorch_does(name: str, tmp_path: Path) -> None:
    """Addresses, statistics, layout, driver memory and errors are equal after every operation."""
    setting = SETTINGS[name]
    done = run_on_phantom(
        SCRIPT,
        name,
        str(OPERATIONS),
        "0",
        memory=setting.gpu,
        state=tmp_path,
        environment={"PYTORCH_CUDA_ALLOC_CONF": setting.conf},
    )

    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["differences"] == []
    assert result["operations"] == OPERATIONS
    assert result["num_ooms"] >= 10
    assert result["num_device_free"] >= 40
    assert result["num_oom_rejections"] >= 10 or name != "rejections"
