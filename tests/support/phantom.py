"""Runs scripts on a phantom card, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT_MEMORY = "16GiB"


def run_on_phantom(
    *script: str | Path, memory: int | str, state: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a Python script with its arguments on a card with `memory` bytes."""
    phantom = ["-m", "torchmem.phantom", "--memory", str(memory), "--state", str(state), "--"]
    return subprocess.run(
        [sys.executable, *phantom, sys.executable, "-W", "ignore", *map(str, script)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def json_of_script(script: str, folder: Path, *arguments: str) -> Any:
    """Return the last line that a script prints, as JSON; compiled files stay in `folder`.

    The script runs on a card of 16 GiB, with json, sys and torch imported.
    """
    path = folder / "script.py"
    path.write_text("import json, sys, torch\n" + script)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    done = run_on_phantom(
        path, *arguments, memory=SCRIPT_MEMORY, state=folder / "phantom", environment=caches
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
