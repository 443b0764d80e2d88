"""How the script's process ends: with the right exit code, and with a report that is whole or not there."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from torchmem.preflight.child.exit import write_report
from torchmem.preflight.result import ProcessReport

IMPORTS = "import os, sys, threading\nfrom torchmem.preflight.child.exit import before_leaving, leave, stop\n"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORTS + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "code", ["stop('no.')", "threading.Thread(target=stop, args=('no.',)).start()"]
)
def test_the_script_is_stopped_from_any_thread(code: str) -> None:
    """One sentence and exit code 2, also where SystemExit would end a thread alone."""
    done = python(code)
    assert (2, "torchmem: no.\n") == (done.returncode, done.stderr)


@pytest.mark.parametrize(
    "code", ["", "sys.stdout.close(); ", "sys.stdout = None; ", "os.close(1); "]
)
def test_a_script_may_close_its_streams(code: str) -> None:
    """The end after the steps wanted is the same for a script without a stdout."""
    done = python(f"print('trained'); {code}leave(0)")
    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.parametrize(
    "callback", ["print('told', flush=True)", "print('told', flush=True) or 1 / 0"]
)
def test_leaving_past_python(callback: str) -> None:
    """`os._exit` of the script is heard first and ends with its own code, whatever comes of that."""
    done = python(f"before_leaving(lambda: {callback}); os._exit(7)")
    assert (7, "told\n", "") == (done.returncode, done.stdout, done.stderr)


def test_a_report_is_whole_or_not_there(tmp_path: Path) -> None:
    """A report that cannot be finished, as on a full disk, leaves nothing that the parent would stumble over."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_report(tmp_path, ProcessReport(True, 1, False, None, (), 0, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert [] == list(tmp_path.iterdir())
