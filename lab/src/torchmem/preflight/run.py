"""Runs a plan: starts the command as a child process on phantom GPUs and ends all its processes.

The child process is measured from inside, by torchmem.preflight.child.
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
from torchmem.preflight.plan import PROGRESS_FILE, VARIABLE, ChildConfig, RunPlan
from torchmem.preflight.result import RunProgress, RunResult, read_result
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import ENVIRONMENT_VARIABLE as RUN_DIR_VARIABLE

if TYPE_CHECKING:
    from typing_extensions import Self

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0
MAX_KILL_ROUNDS = 20
HOOK = "torchmem.preflight.child.hook"
"""The module that every Python of a run installs at its start."""
REMOVED_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""Variables of the caller that would hide the phantom GPUs."""
OUTPUT_VARIABLES = (
    "TORCHMEM_PORT",
    "TORCHMEM_TEXTFILE",
    "TORCHMEM_OTLP",
)
"""Variables with which the script would publish the phantom's memory as a real GPU's."""
OTHER_CONF_VARIABLE = "PYTORCH_ALLOC_CONF"
"""Removed if the plan has settings: only PYTORCH_CUDA_ALLOC_CONF, which carries them, remains."""


def run(
    plan: RunPlan,
    folder: Path,
    progress: Callable[[RunProgress], None],
    *,
    stdout: int | None = None,
    stderr: int | None = None,
) -> RunResult:
    """Run the plan's command until it ends or has made the planned steps.

    folder: an empty scratch folder, which keeps the result's files. progress: called after every
    step. stdout, stderr: descriptors for the script's output, None for the caller's own.

    Raises:
        UsageError: the phantom GPU cannot be built, or the command cannot be started.
    """
    started = time.monotonic()
    script = ScriptProcess(plan.command, child_environment(plan, folder, os.environ))
    reported = 0
    try:
        script.start(stdout, stderr)
        while (exit_code := script.exit_code()) is None:
            reported = _report(folder / PROGRESS_FILE, reported, plan.steps, progress)
            time.sleep(POLL_SECONDS)
    finally:
        script.end()
    _report(folder / PROGRESS_FILE, reported, plan.steps, progress)
    return read_result(folder, exit_code, time.monotonic() - started)


def _report(
    path: Path, reported: int, total_steps: int, progress: Callable[[RunProgress], None]
) -> int:
    """Report the steps that were not reported yet; return how many have been."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    for line in lines[reported:]:
        step, allocated, reserved = map(int, line.split())
        progress(RunProgress(step, total_steps, allocated, reserved))
    return len(lines)


class ScriptProcess:
    """A command in a session of its own, so that the terminal's Ctrl-C does not reach it.

    environment: contains the child configuration, which also identifies processes that have left
    the session.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False

    def start(self, stdout: int | None, stderr: int | None) -> None:
        """Start the command. Raises UsageError.

        Signals are deferred until `end` can find the process.
        """
        try:
            with DeferredSignals():
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                )
        except OSError as error:
            raise UsageError(
                f"cannot run {self._command[0]!r} ({error.strerror}): give a program after --."
            ) from error

    def exit_code(self) -> int | None:
        """Return the exit code, or None if the process is running or was never started.

        An interrupt inside `Popen.poll` would leave its lock held, and a later wait would hang.
        """
        with DeferredSignals():
            return self._process.poll() if self._process else None

    def end(self) -> None:
        """End the process and all that it has started: SIGTERM, a grace period, SIGKILL.

        Another signal to this process ends the grace period.
        """
        if self._process is None or self._has_ended:
            return
        with DeferredSignals() as deferred:
            _signal_group(self._process.pid, signal.SIGTERM)
            self._wait(deferred)
            _signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()
            _kill_processes_with(f"{VARIABLE}={self._environment.get(VARIABLE)}")
            self._has_ended = True

    def _wait(self, deferred: DeferredSignals) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        while self.exit_code() is None and not deferred.received:
            if time.monotonic() > deadline:
                print("torchmem: the script ignores SIGTERM and is killed.", file=sys.stderr)
                return
            time.sleep(POLL_SECONDS)


def child_environment(plan: RunPlan, folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `base` with the variables that run the command on its phantom GPUs.

    The script publishes in `folder`, so that its ranks do not appear among those of the node.
    """
    removed = {*REMOVED_VARIABLES, *OUTPUT_VARIABLES}
    if plan.alloc_conf is not None:
        removed.add(OTHER_CONF_VARIABLE)
    given = {**base, **dict(plan.environment)}
    kept = {name: value for name, value in given.items() if name not in removed}
    torch = cuda_build(plan.command, kept)
    environment = phantom_environment(plan.gpu, plan.devices, folder / "gpus", kept, torch)
    environment |= ChildConfig(folder, plan.steps, plan.placement).to_environment()
    environment["PHANTOM_HOOK"] = HOOK
    environment["TORCHMEM_RUN"] = run_label(plan)
    environment[RUN_DIR_VARIABLE] = str(folder / "run")
    environment["TORCHMEM_NOTE_ON_OOM"] = "0"  # it would name a report, which goes with `folder`
    if plan.alloc_conf is not None:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = plan.alloc_conf
    return environment | (plan.placement.environment() if plan.placement else {})


def run_label(plan: RunPlan) -> str:
    """Return the label `run`, which marks the run as a phantom."""
    words = (part for word in plan.command for part in word.split())  # also those of a shell
    script = next((word for word in words if word.endswith(".py")), plan.command[0])
    return f"{Path(script).stem} (phantom)"


class DeferredSignals:
    """Context manager that defers a signal that asks for the end until its block is done.

    Only the first signal is delivered. Signals without a handler in Python end the process anyway
    and are not deferred. Outside of the main thread, where no handler runs, nothing is changed.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {
                number: handler
                for number in ENDING_SIGNALS
                if callable(handler := signal.getsignal(number))
            }
            for number in self._handlers:
                signal.signal(number, self._defer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # from getsignal
        if self.received:
            signal.raise_signal(self.received[0])

    def _defer(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _kill_processes_with(entry: str) -> None:
    """Kill every process with this environment entry, "NAME=VALUE", in whatever session it is."""
    # A process may have started another one since they were listed.
    for _ in range(MAX_KILL_ROUNDS):
        paths = Path("/proc").glob("[0-9]*/environ")
        pids = [int(path.parent.name) for path in paths if entry.encode() in _entries(path)]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _entries(path: Path) -> list[bytes]:
    """Return the environment of a process, empty if it has ended or belongs to another user."""
    try:
        return path.read_bytes().split(b"\0")
    except OSError:
        return []
