"""Instructions per scrape, counted by Valgrind's callgrind: alike on an idle and a busy machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.scrape.server import Server, started

GPM_SECONDS = 1.2  # GPM metrics need two reads with some time between them
PATIENCE_SECONDS = 600  # a scrape is tens of times slower under Valgrind, and a busy machine adds
PATIENT_FLAGS = ("--scrape-deadline-seconds", str(PATIENCE_SECONDS))
"""Flags of the exporter with which it does not give up a scrape meanwhile."""
LOOKS = 10  # in succession, at which a process at rest does not run
LOOK_SECONDS = 0.05
_CALLGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no")
_TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)


def missing() -> str:
    """Return why instructions cannot be counted here; empty if they can."""
    return "" if shutil.which("valgrind") else "no valgrind on PATH: apt-get install valgrind"


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
            server.scrape(timeout_seconds=PATIENCE_SECONDS)
            time.sleep(GPM_SECONDS)
            _control("--instr=on", server.pid)
            publish()
            server.scrape(timeout_seconds=PATIENCE_SECONDS)
            _wait_until_idle(server)
            _control("--zero", server.pid)
            for _ in range(scrapes):
                publish()
                server.scrape(timeout_seconds=PATIENCE_SECONDS)
            _control("--dump", server.pid)
            total = _TOTAL.search(output.with_suffix(".1").read_text())
        assert total, "callgrind wrote no total"
        return int(total[1]) / scrapes


def _wait_until_idle(server: Server) -> None:
    """Wait until what follows a start or a scrape has ended, such as a garbage collection.

    On a busy machine it takes little CPU time, and long.
    """
    rests = 0
    while rests < LOOKS:
        time.sleep(LOOK_SECONDS)
        rests = 0 if server.is_running else rests + 1


def _control(action: str, pid: int) -> None:
    subprocess.run(["callgrind_control", action, str(pid)], check=True, capture_output=True)
