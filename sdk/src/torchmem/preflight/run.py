"""Runs a plan: the command as a child on phantom cards of its own, watched from inside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torchmem.phantom.environment import phantom_environment
from torchmem.phantom.torch_build import cuda_build
from torchmem.preflight.orders import PROGRESS_FILE, Orders
from torchmem.preflight.outcome import Outcome
from torchmem.preflight.plan import Plan
from torchmem.preflight.progress import Progress
from torchmem.preflight.reading import read_outcome
from torchmem.preflight.script import POLL_SECONDS, Script

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
