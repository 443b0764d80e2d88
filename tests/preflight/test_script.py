"""The script's process: whatever interrupts us, it and all that it has started are gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from torchmem.preflight.plan import ChildConfig
from torchmem.preflight.run import DeferredSignals, ScriptProcess

WATCHER = """
import os, sys, time
from torchmem.preflight.run import ScriptProcess
script = ScriptProcess(sys.argv[1:], os.environ)
try:
    script.start(None, None)
    while script.poll() is None: time.sleep(0.001)
except KeyboardInterrupt:
    print("interrupted", flush=True)
finally:
    script.end()
"""
ROUNDS = """
import os, signal, sys, time
from pathlib import Path
from torchmem.preflight.run import ScriptProcess
interrupted, left = 0, 0
for _ in range(60):
    script = ScriptProcess(("sh", "-c", "kill -INT $PPID; exec sleep 60"), os.environ)
    try:
        try:
            script.start(None, None)
            while script.poll() is None: time.sleep(0.001)
        finally:
            script.end()
    except KeyboardInterrupt:
        interrupted += 1
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        left += 1
        os.kill(int(child), signal.SIGKILL); os.waitpid(int(child), 0)
print(interrupted, left)
"""


def test_a_further_signal_does_not_wait_for_the_script() -> None:
    """A second Ctrl-C, while a script that ignores SIGTERM is given its time, kills it."""
    deaf = "trap 'echo asked' TERM; echo $$; while :; do sleep 0.05; done"
    command = [sys.executable, "-c", WATCHER, "sh", "-c", deaf]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        assert ["interrupted\n", "asked\n"] == [
            process.stdout.readline(),
            process.stdout.readline(),
        ]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)

    assert said.endswith("KeyboardInterrupt\n")
    assert not Path("/proc", pid).exists()


def test_ctrl_c_while_the_script_is_started() -> None:
    """An interrupt in the very moment in which the process comes to be leaves none behind."""
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS], capture_output=True, text=True, timeout=120, check=False
    )

    assert ("60 0\n", "") == (done.stdout, done.stderr)


@pytest.mark.parametrize(
    "away", ["pass", "os.setsid()", "os.setpgid(0, 0)"], ids=["child", "session", "group"]
)
def test_what_the_script_has_started_ends_with_it(tmp_path: Path, away: str) -> None:
    """Helpers in a session or a process group of their own do not stay, even when the script is done with them."""
    started = tmp_path / "started"
    helper = f"import os, time; {away}; print(os.getpid(), file=open({str(started)!r}, 'w'), flush=True); time.sleep(600)"
    (tmp_path / "helper.py").write_text(helper)
    wait = f"while ! [ -s {started} ]; do sleep 0.05; done"
    command = "sh", "-c", f"{sys.executable} {tmp_path}/helper.py & {wait}"
    script = ScriptProcess(command, os.environ | ChildConfig(tmp_path, 1).environment())
    script.start(None, None)
    while script.poll() is None:
        pass
    script.end()

    assert 0 == script.poll()
    assert not _is_alive(int(started.read_text()))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_postponed_signal_comes_once_and_afterwards() -> None:
    """The block is gone through, then the script's handler runs; outside of the main thread nothing is changed."""
    seen: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("handled"))
    try:
        with DeferredSignals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            seen.append("done")
        thread = threading.Thread(target=DeferredSignals().__enter__)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert ["done", "handled", "handled"] == seen
