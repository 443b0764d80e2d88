"""The child process that unpickles a snapshot, seen from its parent: its answer, and how it ends.

What is the file's fault is told apart from what is not: a Python that does not start, a machine
without memory, an error in torchmem.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torchmem
from torchmem.sample.errors import UsageError, WorkerError
from torchmem.sample.untrusted import printable, sanitize_text
from torchmem.trace.interpreter import (
    ErrorOutput,
    ending,
    isolated,
    only_needed,
    signal_name,
)
from torchmem.trace.worker import OUT_OF_MEMORY, WorkerLimits

_ROOTS = [str(Path(folder).parent) for folder in torchmem.__path__]
_PROGRAM = "sys.path[:0] = sys.argv[1:]; from torchmem.trace.worker import main; main({})"
MAX_FIRST_LINE = 1024
POLL_SECONDS = 0.1
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


@dataclass(frozen=True, slots=True)
class SnapshotWorker:
    """A process that reads a snapshot.

    Attributes:
        name: the file, for messages.
        answer: its stdout: lines of `WorkerLimits` and of the header, and the arrays.
    """

    name: str
    answer: IO[bytes]
    process: subprocess.Popen[bytes]
    errors: ErrorOutput

    def header(self, waiting: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return all of the answer but the arrays; call `waiting` again and again until it comes.

        Raises:
            UsageError: the file cannot be used.
            WorkerError: the process has failed.
        """
        limits = self._limits()
        while not select.select([self.answer], [], [], POLL_SECONDS)[0]:
            waiting()
        line = self.answer.readline()
        if not line.endswith(b"\n"):
            raise self._ended(limits)
        header: dict[str, Any] = json.loads(line)
        if "error" in header:
            raise UsageError(f"{self.name} {printable(header['error'])}")
        return header

    def _limits(self) -> WorkerLimits:
        """Return the first line, which says that the process has started. Raises WorkerError."""
        line = self.answer.readline(MAX_FIRST_LINE)
        try:
            return WorkerLimits(**json.loads(line))
        except (ValueError, TypeError):  # the interpreter has not started, or prints a line
            first = sanitize_text(line.decode("utf-8", "replace").strip())
            reason = first or ending(self.process.wait(), self.errors.last_line())
        raise WorkerError(
            f"{self.name} was not read, because the Python process that reads snapshots did not "
            f"start ({reason}): check that `{sys.executable} -S -c pass` works and prints nothing."
        )

    def _ended(self, limits: WorkerLimits) -> UsageError:
        """Return why the process has ended while it read the file."""
        code = self.process.wait()
        if code == OUT_OF_MEMORY:
            return self._exceeded("memory", limits.is_own_memory)
        if code == -signal.SIGXCPU:
            return self._exceeded("time", limits.is_own_time)
        if -code in _CRASHES and limits.is_own_memory:  # with less memory its stack may not grow
            return UsageError(
                f"{self.name} makes Python crash ({signal_name(-code)}), which no snapshot does, "
                "so it is damaged or malicious: record one of your own."
            )
        reason = ending(code, self.errors.last_line())
        if code == -signal.SIGKILL:
            return WorkerError(
                f"{self.name} was not read, because the process that reads it was {reason}, with "
                "which Linux ends processes when memory runs out: try again on a machine with more "
                "free memory."
            )
        return WorkerError(
            f"{self.name} was not read, because the process that reads it failed ({reason}): try "
            "another snapshot or a newer torchmem."
        )

    def _exceeded(self, resource: str, is_own_limit: bool) -> UsageError:
        if is_own_limit:
            return UsageError(
                f"{self.name} needs more {resource} than any snapshot of its size, so it is "
                "damaged or malicious: record one of your own."
            )
        return WorkerError(
            f"{self.name} was not read, because this machine or session allows too little "
            f"{resource}: raise its limit (ulimit), or use another machine."
        )


@contextmanager
def started(descriptor: int, name: str, arguments: str = "") -> Iterator[SnapshotWorker]:
    """Start a worker on an open file, and end it; `arguments` are those of its `main`.

    It has no access to site-packages, and of the environment it gets what Python needs to start.
    """
    command = isolated(_PROGRAM.format(arguments), *_ROOTS)
    with ErrorOutput() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=descriptor,
                stdout=subprocess.PIPE,
                stderr=errors.writer,
                env=only_needed(os.environ),
            )
        except OSError as error:
            raise WorkerError(
                f"cannot start {sys.executable} to read snapshots ({error.strerror})."
            ) from error
        with process:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            try:
                yield SnapshotWorker(name, process.stdout, process, errors)
            finally:
                process.kill()
