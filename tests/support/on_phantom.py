"""Runs a script of ours on the phantom GPU, under one of the settings of `support.allocator_programs`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.allocator_programs import SETTINGS


def on_phantom(
    state: Path, script: str, name: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run `script NAME ARGUMENTS...` on a card of its own, with the allocator configured as the setting says."""
    setting = SETTINGS[name]
    phantom = [
        sys.executable,
        "-m",
        "torchmem.phantom",
        "--memory",
        str(setting.card),
        "--state",
        str(state),
        "--",
    ]
    return subprocess.run(
        [*phantom, sys.executable, "-W", "ignore", script, name, *arguments],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": setting.conf},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
