"""Runs a short script on a phantom card and reads the JSON that it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PHANTOM = (sys.executable, "-m", "torchmem.phantom", "--memory", "16GiB")


def answer_of(script: str, folder: Path, *arguments: str) -> Any:
    """What a script prints last, as JSON, on a card of 16 GiB; what it compiles stays in `folder`."""
    path = folder / "script.py"
    path.write_text("import json, sys, torch\n" + script)
    done = subprocess.run(
        [*PHANTOM, "--state", str(folder / "phantom"), "--", sys.executable, "-W", "ignore", str(path), *arguments],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
