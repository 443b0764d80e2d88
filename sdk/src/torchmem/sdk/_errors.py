"""The SDK's own errors: counted by stage, logged once, never raised into training."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Literal, get_args

Stage = Literal[
    "stats",
    "snapshot",
    "step",
    "phase",
    "capture",
    "release",
    "oom",
    "report",
    "publish",
    "textfile",
    "endpoint",
    "setup",
    "exit",
]
log = logging.getLogger("torchmem")


class Errors:
    """Counts of suppressed errors by stage."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(get_args(Stage), 0)
        self._unlogged: deque[str] = deque()
        self._deferring = 0

    def suppress(self, stage: Stage) -> Suppress:
        """Return a context manager that counts and logs an exception instead of raising it."""
        return Suppress(self, stage)

    def count(self, stage: Stage, error: BaseException) -> None:
        """Count one error; log the first of each stage."""
        self.counts[stage] += 1
        if self.counts[stage] == 1:
            self._unlogged.append(
                f"{stage} failed and was skipped ({type(error).__name__}: {error})"
            )
            if not self._deferring:
                self.log_deferred()

    def defer_logging(self, call: Callable[[], None]) -> Callable[[], None]:
        """Wrap `call` so that its errors are logged by the next `log_deferred`, not by itself.

        For calls that interrupt the script's own code in the main thread. The script may hold a
        lock there that its logging handler waits for, such as that of a queue.Queue.
        """

        def wrapper() -> None:
            self._deferring += 1
            try:
                call()
            finally:
                self._deferring -= 1

        return wrapper

    def log_deferred(self) -> None:
        """Log every message that has not been logged yet."""
        with contextlib.suppress(IndexError):  # another thread has logged the rest
            while self._unlogged:
                log.warning("torchmem: %s", self._unlogged.popleft())


class Suppress:
    """The context manager of `Errors.suppress`: a class, because it is cheaper to enter."""

    __slots__ = ("_errors", "_stage")

    def __init__(self, errors: Errors, stage: Stage) -> None:
        self._errors = errors
        self._stage = stage

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._errors.count(self._stage, error)
        return True
