"""The demo's beginning and end: a short story, an impatient user, a busy machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchmem.demo.play import _show
from torchmem.demo.ranks import END_SECONDS, Plan, Ranks

DEMO = [sys.executable, "-m", "torchmem.cli", "demo", "--listen", "127.0.0.1:0"]


def test_it_ends_before_a_rank_has_begun(tmp_path: Path) -> None:
    """A story that is over while the ranks' processes still start ends without an error."""
    done = subprocess.run(
        [*DEMO, "--ranks", "2", "--duration", "0.01"], capture_output=True, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)}, timeout=60, check=False,
    )  # fmt: skip

    assert (0, "") == (done.returncode, done.stderr)
    assert [] == list(tmp_path.iterdir())


def test_an_impatient_user(tmp_path: Path) -> None:
    """Ctrl-C again and again, which the starting ranks hear too, leaves no traceback and no file."""
    with subprocess.Popen(
        [*DEMO, "--ranks", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        demo.stdout.readline()
        time.sleep(0.5)  # the ranks' processes are there by now, and import
        while demo.poll() is None:
            os.killpg(demo.pid, signal.SIGINT)
            time.sleep(0.01)
        _, errors = demo.communicate(timeout=60)

    assert (0, "") == (demo.returncode, errors)
    assert [] == list(tmp_path.iterdir())


def test_an_exporter_that_is_too_busy(capsys: pytest.CaptureFixture[str]) -> None:
    """A scrape that fails costs a line of the screen, not the demo."""
    ranks = cast("Ranks", SimpleNamespace(alive=lambda: True, pids=[]))
    _show(Plan("fragmentation", 1, 0.1, 0), ranks, "demo", "http://127.0.0.1:1")

    assert "" == capsys.readouterr().err


class Stubborn:
    """A process that ends only when it is killed; `waits` collects how long each is waited for."""

    def __init__(self, waits: list[float]) -> None:
        self._waits = waits
        self._lives = True

    def terminate(self) -> None:
        """It does not listen."""

    def kill(self) -> None:
        """It has no choice."""
        self._lives = False

    def is_alive(self) -> bool:
        """Until it is killed."""
        return self._lives

    def join(self, seconds: float | None = None) -> None:
        """Take a little of the time."""
        if seconds is not None:
            self._waits.append(seconds)
            time.sleep(0.01)


def test_ranks_that_do_not_listen_share_one_grace_period(tmp_path: Path) -> None:
    """However many ranks do not end when they are asked, all are killed after the same few seconds."""
    waits: list[float] = []
    ranks = Ranks(Plan("fragmentation", 3, 1, 0), tmp_path)
    ranks._processes = cast("Any", {rank: Stubborn(waits) for rank in range(3)})
    ranks.close()

    assert END_SECONDS >= waits[0] > waits[1] > waits[2]
