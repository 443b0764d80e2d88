"""Count the instructions that Python code takes, with Valgrind's callgrind.

`count` runs a script twice in a process of its own, and the difference tells what the repeated part
takes, without the start of Python. Counts barely depend on the machine's load: the same code gives
the same count within a few tenths of a percent, unlike any clock.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)


def available() -> bool:
    """Return whether callgrind is installed (apt install valgrind)."""
    return shutil.which("valgrind") is not None


def total(script: str, environment: Mapping[str, str] = os.environ) -> int:
    """Return the instructions of a Python process that runs a script, in all its threads."""
    with tempfile.TemporaryDirectory(prefix="torchmem-benchmark-") as folder:
        out = Path(folder, "out")
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            sys.executable,
            "-W",
            "ignore",
            "-c",
            script,
        ]
        done = subprocess.run(
            command,
            env={**environment, "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        return max(map(int, _TOTAL.findall(out.read_text())))


def count(script: str, times: int, environment: Mapping[str, str] = os.environ) -> float:
    """Return the instructions of one repetition. The script finds in `TIMES` how many to do."""
    once = total(f"TIMES = {times}\n{script}", environment)
    thrice = total(f"TIMES = {3 * times}\n{script}", environment)
    return (thrice - once) / (2 * times)
