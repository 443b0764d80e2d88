"""Runs plans one after another, each in its own scratch folder, and shows their progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from torchmem.allocator.sizes import format_size
from torchmem.output.terminal import PLAIN_INTERVAL_SECONDS, StatusLine
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import RunProgress, RunResult

LINE_SECONDS = 2.0
"""The time between lines of progress on a terminal to which the script writes, too."""


class RunFunction(Protocol):
    """The type of torchmem.preflight.run.run."""

    def __call__(
        self,
        plan: RunPlan,
        folder: Path,
        progress: Callable[[RunProgress], None],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> RunResult:
        """Run the plan."""


@dataclass(slots=True)
class Runner:
    """Runs plans in separate folders below `scratch`.

    json: stdout is reserved for the JSON document, so the script's stdout goes to stderr. clock:
    seconds, from any start.
    """

    run: RunFunction
    scratch: Path
    json: bool = False
    clock: Callable[[], float] = time.monotonic
    _number: int = field(default=0, init=False)
    _started: float = field(init=False)
    _announce_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._announce_at = self._started + PLAIN_INTERVAL_SECONDS

    @property
    def runs(self) -> int:
        """Number of runs so far."""
        return self._number

    def elapsed_seconds(self) -> float:
        """Return the wall time since this runner was made, including the time between runs."""
        return self.clock() - self._started

    def run_visible(self, plan: RunPlan) -> RunResult:
        """Run the plan and pass the script's output through."""
        stdout = sys.stderr.fileno() if self.json else None
        status = StatusLine(plain_seconds=LINE_SECONDS)

        def progress(now: RunProgress) -> None:
            _show(status, f"preflight (phantom): step {now.step:,} of {now.total_steps:,}", now)

        return self.run(plan, self._new_folder(), progress, stdout=stdout)

    def run_captured(self, plan: RunPlan, label: str) -> RunResult:
        """Run the plan and show the script's output, on stderr, only if it ends with an error.

        label: description for the progress.
        """
        folder = self._new_folder()
        self._announce(label)
        with (folder.parent / f"{folder.name}.output").open("w+b") as output:
            descriptor = output.fileno()
            with StatusLine() as status:
                progress = partial(_show, status, label)
                result = self.run(plan, folder, progress, stdout=descriptor, stderr=descriptor)
            if result.ended in {"error", "unsupported"}:
                output.seek(0)
                show_output(output.read())
        return result

    def _announce(self, label: str) -> None:
        """Print now and then which run starts: short runs show no progress without a terminal."""
        now = self.clock()
        if now >= self._announce_at and not sys.stderr.isatty():
            self._announce_at = now + PLAIN_INTERVAL_SECONDS
            line = f"torchmem: run {self._number} of the script, {label}; {now - self._started:.0f}"
            print(f"{line} s so far", file=sys.stderr, flush=True)

    def _new_folder(self) -> Path:
        self._number += 1
        folder = self.scratch / str(self._number)
        folder.mkdir()
        return folder


def _show(status: StatusLine, label: str, progress: RunProgress) -> None:
    """Show the progress of a run if an update is due."""
    status.show(
        lambda: f"{label}, {format_size(progress.peak_reserved)} reserved so far",
        progress.step,
        progress.total_steps,
    )


def show_output(output: bytes) -> None:
    """Print the output of a script on stderr."""
    sys.stderr.flush()
    sys.stderr.buffer.write(output)
    sys.stderr.flush()
