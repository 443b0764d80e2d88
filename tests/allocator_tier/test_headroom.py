"""Headroom is not an estimate: it is what can be allocated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.allocator

HERE = Path(__file__).resolve().parent


def test_headroom_is_the_largest_allocation_that_succeeds(tmp_path: Path) -> None:
    """In 400 random states at default settings exactly `headroom` bytes can be had, without and with the flush."""
    command = [
        sys.executable,
        "-m",
        "torchmem.phantom",
        "--memory",
        "1300MiB",
        "--",
        sys.executable,
        "-W",
        "ignore",
    ]
    done = subprocess.run(
        [*command, str(HERE / "headroom_by_trying.py"), "400", "0"],
        env=os.environ | {"PHANTOM_STATE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip

    assert "400 states, 0 disagreements\n" == done.stdout, done.stderr[-2000:]
