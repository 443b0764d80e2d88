"""Waiting for signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

CHILD = """
import os, signal, sys
from torchmem.sample.signals import wait_for_signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
while True:
    sys.stdout.buffer.write(b"waits\\n")
    sys.stdout.flush()
    received = wait_for_signal((signal.SIGTERM,), 0.3)
    if received is not None:
        sys.exit(received)
"""


def test_a_process_that_was_stopped_goes_on_waiting() -> None:
    """Neither SIGSTOP nor SIGCONT counts as a signal, however long the process was stopped."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(3):
            child.stdout.readline()
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            time.sleep(0.4)  # longer than it waits for a signal
            child.send_signal(signal.SIGCONT)
        child.send_signal(signal.SIGTERM)
        child.stdout.read()

    assert child.returncode == signal.SIGTERM
