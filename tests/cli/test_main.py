"""The `torchmem` command, whichever subcommand it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.waiting import until


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """Ctrl-C ends a subcommand with one line on stderr and the exit code that shells expect."""
    thresholds = tmp_path / "thresholds.yml"
    os.mkfifo(thresholds)
    arguments = ["--thresholds", str(thresholds), "--out", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "torchmem.cli", "rules", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        writer = until(lambda: _opened(thresholds))
        command.send_signal(signal.SIGINT)
        _, errors = command.communicate(timeout=120)
    os.close(writer)

    assert (command.returncode, errors) == (130, "torchmem: interrupted.\n")


def _opened(fifo: Path) -> int | None:
    """Return a descriptor to write to the FIFO once a process reads from it."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
