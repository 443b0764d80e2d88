"""The exporter stays as it is, on a node where processes, ranks, GPUs and errors come and go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_nothing_grows(root: Path) -> None:
    """Objects, memory, files and threads are the same at the middle and at the end, and no series outlives its source.

    `python -m benchmarks.exporter_soak` is the same over 20,000 scrapes.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.exporter_soak",
        "--scrapes",
        "500",
        "--http-scrapes",
        "100",
    ]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    assert 0 == ended.returncode, ended.stdout + ended.stderr
