"""How far a script is, on stderr where that is a terminal.

Running plans one after the other: where their files and what the script says go, and how far they are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TextIO

from torchmem.allocator.sizes import format_size
from torchmem.cli.terminal import StatusLine, bar
from torchmem.preflight.outcome import Outcome, Progress
from torchmem.preflight.plan import Plan
from torchmem.sample.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

LINE_SECONDS = 2.0


class Steps(StatusLine):
    """One line that is drawn over again, for a script whose output is kept away from the terminal."""

    def __init__(
        self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`label`: what is being tried."""
        super().__init__(stream, clock)
        self._label = label

    def __call__(self, progress: Progress) -> None:
        """Draw, unless the run is young, the last line is fresh, or nobody looks."""
        self.show(
            lambda: bar(f"{self._label}, {_memory(progress)}", progress.step, progress.steps_wanted)
        )


class Lines:
    """Whole lines every now and then, between those of a script that writes to the same terminal."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next = clock() + LINE_SECONDS

    def __call__(self, progress: Progress) -> None:
        """Write a line, unless the last one is fresh, or nobody looks."""
        now = self._clock()
        if now >= self._next and self._stream.isatty():
            self._next = now + LINE_SECONDS
            step = f"step {progress.step:,} of {progress.steps_wanted:,}"
            self._stream.write(f"torchmem preflight (phantom): {step}, {_memory(progress)}\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is left to wipe."""


def _memory(progress: Progress) -> str:
    return f"{format_size(progress.peak_reserved)} reserved so far"


SIGNAL_BASE = 128
"""What a shell adds to the number of the signal that ended a program."""


class Runner(Protocol):
    """torchmem.preflight.run.run, or what stands in for it."""

    def __call__(
        self,
        plan: Plan,
        folder: Path,
        progress: Callable[[Progress], None],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Outcome:
        """Run the plan."""


@dataclass(slots=True)
class Attempts:
    """Runs plans in folders of their own below `scratch`. `json`: stdout is ours alone."""

    runner: Runner
    scratch: Path
    json: bool = False
    _number: int = field(default=0, init=False)

    def openly(self, plan: Plan) -> Outcome:
        """Run it with its output passed through."""
        with Lines() as progress:
            return self.runner(
                plan, self._folder(), progress, stdout=sys.stderr.fileno() if self.json else None
            )

    def quietly(self, plan: Plan, label: str) -> Outcome:
        """Run it with its output kept; shown on stderr only when it ends with an error of its own."""
        folder = self._folder()
        with (folder.parent / f"{folder.name}.output").open("w+b") as output:
            with Steps(label) as progress:
                outcome = self.runner(
                    plan, folder, progress, stdout=output.fileno(), stderr=output.fileno()
                )
            if outcome.ended in {"error", "unsupported"}:
                _show(output)
        return outcome

    def _folder(self) -> Path:
        self._number += 1
        folder = self.scratch / str(self._number)
        folder.mkdir()
        return folder


def _show(output: BinaryIO) -> None:
    output.seek(0)
    sys.stderr.flush()
    sys.stderr.buffer.write(output.read())
    sys.stderr.flush()


def failure(outcome: Outcome) -> UsageError | None:
    """Why an outcome allows no verdict; None when it does."""
    if outcome.ended == "error":
        code = outcome.exit_code if outcome.exit_code >= 0 else SIGNAL_BASE - outcome.exit_code
        return UsageError(
            f"the script ended with exit code {code} {_after(outcome.steps)}, so there is no verdict: see its own "
            f"messages above{_zeros(outcome.values_read)}."
        )
    if outcome.ended == "unsupported":
        names = ", ".join(dict.fromkeys(outcome.lacking)) or "a CUDA call"
        return UsageError(
            f"the script needs {names}, which the phantom GPU does not have: leave that part out, or use a real card."
        )
    if outcome.ended != "oom" and not outcome.devices:
        return UsageError(
            "the script never used CUDA: let it train on the GPU, as with a --device cuda of its own."
        )
    if outcome.ended != "oom" and not outcome.steps:
        return UsageError(
            "the script ended without an optimizer step: let it train for one, or call session.step() of torchmem.sdk "
            "in a loop without an optimizer of torch.optim."
        )
    return None


def _zeros(values_read: int) -> str:
    if not values_read:
        return ""
    return (
        f"; it had read {values_read:,} value{'s' * (values_read != 1)} from the phantom, which are zero, so leave out "
        "what needs a real one"
    )


def _after(steps: int) -> str:
    return (
        "before its first optimizer step"
        if not steps
        else f"after {steps:,} optimizer step{'s' * (steps != 1)}"
    )
