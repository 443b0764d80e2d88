"""The `torchmem` command, whichever subcommand it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.waiting import until


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """Ctrl-C ends any subcommand with one line and with the exit code that shells give it."""
    nobody_writes = tmp_path / "thresholds.yml"
    os.mkfifo(nobody_writes)
    command = [
        sys.executable,
        "-m",
        "torchmem.cli",
        "rules",
        "--thresholds",
        str(nobody_writes),
        "--out",
        str(tmp_path),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as popen:
        writing = until(lambda: _opened(nobody_writes))
        popen.send_signal(signal.SIGINT)
        _, said = popen.communicate(timeout=120)
    os.close(writing)

    assert (130, "torchmem: interrupted.\n") == (popen.returncode, said)


def _opened(fifo: Path) -> int | None:
    """A descriptor to write to it once somebody reads."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
