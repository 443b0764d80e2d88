"""The end of the script's process: the right exit code, and a complete report or none."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from torchmem.preflight.child.exit import write_report
from torchmem.preflight.result import ProcessReport

IMPORTS = """
import os, sys, threading
from torchmem.preflight.child.exit import before_leaving, leave, stop
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORTS + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "code", ["stop('no.')", "threading.Thread(target=stop, args=('no.',)).start()"]
)
def test_stop_ends_the_script_from_any_thread(code: str) -> None:
    """It prints one sentence and exits with code 2, even from a thread."""
    done = python(code)
    assert (done.returncode, done.stderr) == (2, "torchmem: no.\n")


@pytest.mark.parametrize(
    "code", ["", "sys.stdout.close(); ", "sys.stdout = None; ", "os.close(1); "]
)
def test_leave_accepts_closed_streams(code: str) -> None:
    """A script without a stdout ends like any other after the planned steps."""
    done = python(f"print('trained'); {code}leave(0)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "callback", ["print('called', flush=True)", "print('called', flush=True) or 1 / 0"]
)
def test_os_exit_runs_the_callback(callback: str) -> None:
    """The script's `os._exit` keeps its exit code, even if the callback fails."""
    done = python(f"before_leaving(lambda: {callback}); os._exit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, "called\n", "")


def test_a_report_is_complete_or_missing(tmp_path: Path) -> None:
    """A report that cannot be completed, for example on a full disk, leaves no file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_report(tmp_path, ProcessReport(True, 1, False, None, (), 0, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert list(tmp_path.iterdir()) == []
