"""The script's process: its environment, and its end together with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.waiting import until

from torchmem.phantom.gpus import parse_gpu_model
from torchmem.preflight.plan import ChildConfig, Placement, RunPlan
from torchmem.preflight.run import DeferredSignals, ScriptProcess, run_label

WATCHER = """
import os, sys, time
from torchmem.preflight.run import ScriptProcess
script = ScriptProcess(sys.argv[1:], os.environ)
try:
    script.start(None, None)
    while script.exit_code() is None: time.sleep(0.001)
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
            while script.exit_code() is None: time.sleep(0.001)
        finally:
            script.end()
    except KeyboardInterrupt:
        interrupted += 1
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        left += 1
        os.kill(int(child), signal.SIGKILL); os.waitpid(int(child), 0)
print(interrupted, left)
"""


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (("python", "src/train.py", "--x", "y.py"), "train (phantom)"),
        (("python", "-m", "package.train"), "python (phantom)"),
        (("sh", "-c", "exec python train.py --x 1"), "train (phantom)"),
    ],
)
def test_the_run_label_marks_a_phantom(command: tuple[str, ...], label: str) -> None:
    """Dashboards show that the run is not a real one."""
    assert run_label(RunPlan(command, parse_gpu_model("80GB"))) == label


def test_a_placement_has_the_environment_of_torchrun() -> None:
    """Rank 11 of 16 on nodes of 8 is local rank 3 of the second node."""
    environment = Placement(11, 16, 8).environment()
    expected = {
        "RANK": "11",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "1",
    }
    assert {name: environment[name] for name in expected} == expected


def test_a_second_signal_ends_the_grace_period() -> None:
    """A second Ctrl-C kills a script that ignores SIGTERM."""
    stubborn = "trap 'echo asked' TERM; echo $$; while :; do sleep 0.05; done"
    command = [sys.executable, "-c", WATCHER, "sh", "-c", stubborn]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert lines == ["interrupted\n", "asked\n"]
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)

    assert stderr.endswith("KeyboardInterrupt\n")
    assert not Path("/proc", pid).exists()


def test_ctrl_c_while_the_script_is_started() -> None:
    """An interrupt at the moment of the process's creation leaves no process behind."""
    command = [sys.executable, "-c", ROUNDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (done.stdout, done.stderr) == ("60 0\n", "")


@pytest.mark.parametrize(
    "away", ["pass", "os.setsid()", "os.setpgid(0, 0)"], ids=["child", "session", "group"]
)
def test_processes_of_the_script_end_with_it(tmp_path: Path, away: str) -> None:
    """Helpers end too, also in a session or process group of their own or after the script."""
    started = tmp_path / "started"
    (tmp_path / "helper.py").write_text(
        f"import os, time; {away}\n"
        f"print(os.getpid(), file=open({str(started)!r}, 'w'), flush=True); time.sleep(600)"
    )
    wait = f"while ! [ -s {started} ]; do sleep 0.05; done"
    command = "sh", "-c", f"{sys.executable} {tmp_path}/helper.py & {wait}"
    script = ScriptProcess(command, os.environ | ChildConfig(tmp_path, 1).to_environment())
    script.start(None, None)
    while script.exit_code() is None:
        pass
    script.end()

    assert script.exit_code() == 0
    helper = int(started.read_text())
    until(lambda: not _is_alive(helper))  # a killed process takes a moment to end


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_deferred_signal_is_delivered_once_after_the_block() -> None:
    """The handler runs when the block is done; other threads change nothing."""
    events: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: events.append("handled"))
    try:
        with DeferredSignals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            events.append("done")
        thread = threading.Thread(target=DeferredSignals().__enter__)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert events == ["done", "handled", "handled"]
