"""Signals that wait until something is done that must not be left half done.

The script's process and all that it starts: none of them outlives the run.

Runs a plan: the command as a child on phantom cards of its own, watched from inside.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from torchmem.phantom.environment import phantom_environment
from torchmem.phantom.torch_build import cuda_build
from torchmem.preflight.outcome import Outcome, Progress, read_outcome
from torchmem.preflight.plan import PROGRESS_FILE, VARIABLE, Orders, Plan
from torchmem.sample.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Postponed:
    """`with Postponed() as signals:` the first signal that asks for the end has its effect after the block.

    Only signals that have a handler in Python, as only these leave the process alive; in other threads than the main
    one, where no handler runs, nothing is changed.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: handler
                for number in ENDING
                if callable(handler := signal.getsignal(number))
            }
            for number in self._handlers:
                signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal gave
        if self.came:
            signal.raise_signal(self.came[0])

    def _note(self, number: int, _: FrameType | None) -> None:
        self.came.append(number)


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
                    self._command,
                    env=self._environment,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
        except OSError as error:
            raise UsageError(
                f"cannot run {self._command[0]!r} ({error.strerror}): name a program after --."
            ) from error

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
                print(
                    "torchmem: the script does not end when asked to; it is killed.",
                    file=sys.stderr,
                )
                return
            time.sleep(POLL_SECONDS)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def kill_carriers(entry: str) -> None:
    """Kill every process that has this entry, `NAME=VALUE`, in its environment, in whatever session it is."""
    for _ in range(MOST_ROUNDS):
        found = [
            path
            for path in Path("/proc").glob("[0-9]*/environ")
            if entry.encode() in _entries(path)
        ]
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


STARTUP = Path(__file__).resolve().parent / "child" / "startup"
HIDING = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF")
"""Of the caller's environment, what would hide the phantom cards; the last one goes before PYTORCH_CUDA_ALLOC_CONF."""


def run(
    plan: Plan,
    folder: Path,
    progress: Callable[[Progress], None],
    *,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Outcome:
    """Run the plan's command to its end, or until its steps are over; `progress` is told after every step.

    folder: an empty scratch folder, in which the outcome's files stay. stdout, stderr: descriptors for what the
    script says, None for the caller's own.

    Raises:
        UsageError: the phantom GPU cannot be built, or the command cannot be started.
    """
    started = time.monotonic()
    script = Script(plan.command, child_environment(plan, folder, os.environ))
    try:
        script.start(stdout, stderr)
        exit_code = _wait(script, plan, folder / PROGRESS_FILE, progress)
    finally:
        script.end()
    return read_outcome(folder, exit_code, time.monotonic() - started)


def child_environment(plan: Plan, folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with everything that puts the command on its phantom cards; `base` itself is left as it is."""
    kept = {
        name: value
        for name, value in base.items()
        if name not in HIDING or not _replaces(plan, name)
    }
    torch = cuda_build(plan.command, kept)
    environment = phantom_environment(plan.card, plan.devices, folder / "cards", kept, torch)
    environment |= Orders(folder, plan.steps, plan.placement).environment()
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(STARTUP), *filter(None, [base.get("PYTHONPATH")])]
    )
    environment["TORCHMEM_RUN"] = run_label(plan)
    if plan.alloc_conf is not None:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = plan.alloc_conf
    return environment | (plan.placement.environment() if plan.placement else {})


def _replaces(plan: Plan, name: str) -> bool:
    return name != "PYTORCH_ALLOC_CONF" or plan.alloc_conf is not None


def run_label(plan: Plan) -> str:
    """The label `run`, which says what this is."""
    script = next((word for word in plan.command if word.endswith(".py")), plan.command[0])
    return f"{plan.run or Path(script).stem} (phantom)"


def _wait(script: Script, plan: Plan, path: Path, progress: Callable[[Progress], None]) -> int:
    told = 0
    while True:
        exit_code = script.poll()
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        for line in lines[told:]:
            step, allocated, reserved = map(int, line.split())
            progress(Progress(step, plan.steps, allocated, reserved))
        told = len(lines)
        if exit_code is not None:
            return exit_code
        time.sleep(POLL_SECONDS)
