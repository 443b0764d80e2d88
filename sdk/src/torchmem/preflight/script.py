"""The script's process and all that it starts: none of them outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchmem.core.errors import UsageError
from torchmem.preflight.orders import VARIABLE
from torchmem.preflight.signals import Postponed

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0
MOST_ROUNDS = 20


class Script:
    """A command in a session of its own, so that the terminal's Ctrl-C reaches us alone.

    `environment` holds the orders, by which processes are known that have left the session.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, stdout: int | None, stderr: int | None) -> None:
        """Start it; raises UsageError. A signal that comes meanwhile waits until `end` can find the process."""
        try:
            with Postponed():
                self._process = subprocess.Popen(
                    self._command, env=self._environment, stdout=stdout, stderr=stderr, start_new_session=True
                )
        except OSError as error:
            raise UsageError(f"cannot run {self._command[0]!r} ({error.strerror}): name a program after --.") from error

    def poll(self) -> int | None:
        """The exit code; None while it runs, or was never started.

        An interrupt in the midst of `Popen.poll` would leave its lock held, and who waits later would wait for ever.
        """
        with Postponed():
            return self._process.poll() if self._process else None

    def end(self) -> None:
        """End it and all that it has started: asked to, and killed at once at a further signal."""
        if self._process is None:
            return
        with Postponed() as signals:
            _signal_group(self._process.pid, signal.SIGTERM)
            self._wait(signals)
            _signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()
            kill_carriers(f"{VARIABLE}={self._environment.get(VARIABLE)}")

    def _wait(self, signals: Postponed) -> None:
        latest = time.monotonic() + GRACE_SECONDS
        while self.poll() is None and not signals.came:
            if time.monotonic() > latest:
                print("torchmem: the script does not end when asked to; it is killed.", file=sys.stderr)
                return
            time.sleep(POLL_SECONDS)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def kill_carriers(entry: str) -> None:
    """Kill every process that has this entry, `NAME=VALUE`, in its environment, in whatever session it is."""
    for _ in range(MOST_ROUNDS):
        found = [path for path in Path("/proc").glob("[0-9]*/environ") if entry.encode() in _entries(path)]
        if not found:
            return
        for path in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(path.parent.name), signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _entries(path: Path) -> list[bytes]:
    """Nothing of a process that has ended, or is another user's."""
    try:
        return path.read_bytes().split(b"\0")
    except OSError:
        return []
