"""Runs the subjects one after the other, each as long as the run's time allows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from experiments.real_gpu.figures import SECONDS, Figure, read
from experiments.real_gpu.machine import ROOT
from experiments.real_gpu.registry import TOTAL_SECONDS, Subject

State = Literal["passed", "failed", "skipped", "out of time"]
GRACE_SECONDS = 3.0
ERROR_CHARACTERS = 3000


@dataclass(frozen=True, slots=True)
class Result:
    """What a subject found on one GPU.

    reason: why it failed to run or was skipped; "" otherwise.
    errors: the end of what it wrote to stderr, if it failed to run.
    """

    name: str
    state: State
    seconds: float
    reason: str = ""
    figures: list[Figure] = field(default_factory=list)
    errors: str = ""


Command = Callable[[list[str], Path], list[str]]
"""Returns the command that runs a command on a GPU; the folder is the subject's own."""


def run(
    subjects: Sequence[Subject],
    seconds: float,
    environment: Mapping[str, str],
    on_gpu: Command,
    done: Callable[[Result], None],
) -> None:
    """Run the subjects on one GPU, and tell `done` of each.

    The time of a subject ends when its own share and those of all before it are over, so what one
    leaves is there for those after it. A subject whose time has ended before it began is skipped.
    """
    began, share = time.monotonic(), 0.0
    planned = sum(subject.seconds for subject in subjects) or TOTAL_SECONDS
    for subject in subjects:
        share += subject.seconds * seconds / planned
        left = began + share - time.monotonic()
        if subject.left_out:
            done(Result(subject.name, "skipped", 0.0, subject.left_out))
        elif left <= 0:
            done(Result(subject.name, "out of time", 0.0, "those before it took its time"))
        else:
            done(_run_one(subject, left, environment, on_gpu))


def _run_one(
    subject: Subject, seconds: float, environment: Mapping[str, str], on_gpu: Command
) -> Result:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        path, errors = folder / "figures", folder / "errors"
        own = {"TMPDIR": scratch, "TORCHMEM_RUN_DIR": str(folder / "run"), SECONDS: str(seconds)}
        command = [sys.executable, "-W", "ignore", "-m", "experiments.real_gpu.child"]
        code = _ended(
            on_gpu([*command, str(path), subject.name], folder),
            {**environment, **own},
            errors,
            seconds,
        )
        text = errors.read_text(encoding="utf-8", errors="replace").strip() if code else ""
        return _result(subject, code, text, read(path), time.monotonic() - began)


def _result(
    subject: Subject, code: int | None, errors: str, figures: list[Figure], seconds: float
) -> Result:
    state: State = "passed"
    reason = errors.rpartition("\n")[2][:300]
    if any(figure.right is False for figure in figures) or code:
        state = "failed"
    elif code is None:
        state, reason = "out of time", "it was ended"
    elif all(figure.value is None for figure in figures):
        state, reason = "skipped", "; ".join(figure.note for figure in figures)
    return Result(
        subject.name, state, round(seconds, 1), reason, figures, errors[-ERROR_CHARACTERS:]
    )


def _ended(
    command: list[str], environment: Mapping[str, str], errors: Path, seconds: float
) -> int | None:
    """Run a command in a session of its own; return its exit code, None if it was ended."""
    with errors.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the session: first with SIGTERM, so that a daemon can be stopped."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
