"""Instructions per scrape, counted by Valgrind's callgrind: alike on an idle and a busy machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.scrape.server import started

GPM_SECONDS = 1.2  # GPM metrics need two reads with some time between them
_CALLGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no")
_TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)


def missing() -> str:
    """Return why instructions cannot be counted here; empty if they can."""
    return "" if shutil.which("valgrind") else "valgrind is not installed"


def per_scrape(
    command: Sequence[str],
    environment: Mapping[str, str],
    publish: Callable[[], None] = lambda: None,
    scrapes: int = 3,
) -> float:
    """Return the mean of the instructions that a server executes for one scrape.

    `command` starts the server, with the word PORT for its port. `publish` is called before each
    scrape. The first scrapes are not counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "callgrind")
        counted = [*_CALLGRIND, f"--callgrind-out-file={output}", *command]
        with started(counted, {**environment, "PYTHONHASHSEED": "0"}) as server:
            server.scrape()
            time.sleep(GPM_SECONDS)
            _control("--instr=on", server.pid)
            publish()
            server.scrape()
            _control("--zero", server.pid)
            for _ in range(scrapes):
                publish()
                server.scrape()
            _control("--dump", server.pid)
            total = _TOTAL.search(output.with_suffix(".1").read_text())
        assert total, "callgrind wrote no total"
        return int(total[1]) / scrapes


def _control(action: str, pid: int) -> None:
    subprocess.run(["callgrind_control", action, str(pid)], check=True, capture_output=True)
