"""Runs a plan: the command as a child on phantom cards of its own, watched from inside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torchmem.core.errors import UsageError
from torchmem.phantom.environment import phantom_environment
from torchmem.phantom.torch_build import cuda_build
from torchmem.preflight.orders import PROGRESS_FILE, Orders
from torchmem.preflight.outcome import Outcome
from torchmem.preflight.plan import Plan
from torchmem.preflight.progress import Progress
from torchmem.preflight.reading import read_outcome

STARTUP = Path(__file__).resolve().parent / "child" / "startup"
POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0
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
    process = _start(plan, folder, stdout, stderr)
    try:
        _wait(process, plan, folder / PROGRESS_FILE, progress)
    finally:
        _end_all(process)
    return read_outcome(folder, process.returncode, time.monotonic() - started)


def _start(plan: Plan, folder: Path, stdout: int | None, stderr: int | None) -> subprocess.Popen[bytes]:
    environment = child_environment(plan, folder, os.environ)
    try:
        return subprocess.Popen(plan.command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)
    except OSError as error:
        raise UsageError(f"cannot run {plan.command[0]!r} ({error.strerror}): name a program after --.") from error


def child_environment(plan: Plan, folder: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with everything that puts the command on its phantom cards; `base` itself is left as it is."""
    kept = {name: value for name, value in base.items() if name not in HIDING or not _replaces(plan, name)}
    torch = cuda_build(plan.command, kept)
    environment = phantom_environment(plan.card, plan.devices, folder / "cards", kept, torch)
    environment |= Orders(folder, plan.steps, plan.placement).environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *filter(None, [base.get("PYTHONPATH")])])
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


def _wait(process: subprocess.Popen[bytes], plan: Plan, path: Path, progress: Callable[[Progress], None]) -> None:
    told = 0
    while True:
        ended = process.poll() is not None
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        for line in lines[told:]:
            step, allocated, reserved = map(int, line.split())
            progress(Progress(step, plan.steps, allocated, reserved))
        told = len(lines)
        if ended:
            return
        time.sleep(POLL_SECONDS)


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """The command and all that it started: they share a session of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            print("torchmem: the script does not end when asked to; it is killed.", file=sys.stderr)
    process.wait()
