"""The exporter does not grow on a node where processes, ranks, GPUs and errors keep changing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.needs import needs


@needs("cc")
def test_nothing_grows(root: Path) -> None:
    """Objects, memory, files and threads do not grow, and no series outlives its source.

    `python -m benchmarks.exporter_soak` checks the same over 20,000 scrapes.
    """
    flags = ["--scrapes", "500", "--http-scrapes", "100"]
    command = [sys.executable, "-m", "benchmarks.exporter_soak", *flags]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
