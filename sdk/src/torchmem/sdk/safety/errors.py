"""The SDK's own errors: counted by stage, logged once, never raised into training."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Literal, TypeVar, get_args

from torchmem.sdk.safety.interruptions import is_interruption

Stage = Literal[
    "stats",
    "snapshot",
    "step",
    "phase",
    "components",
    "engine",
    "capture",
    "memory_map",
    "history",
    "release",
    "oom",
    "report",
    "values",
    "publish",
    "textfile",
    "endpoint",
    "otlp",
    "tracker",
    "setup",
    "exit",
]
T = TypeVar("T")

_log = logging.getLogger("torchmem")


def log(level: int, message: str, *arguments: object) -> None:
    """Log a message; an error of the script's logging handlers does not reach the caller.

    It is reported as `logging` reports errors of its own handlers: on stderr, with its traceback,
    unless `logging.raiseExceptions` is false.
    """
    try:
        _log.log(level, message, *arguments)
    except Exception as error:
        if is_interruption(error):
            raise
        record = _log.makeRecord(_log.name, level, __file__, 0, message, arguments, None)
        logging.NullHandler().handleError(record)


class Errors:
    """Counts of suppressed errors by stage; a stage without an error is not in `counts`."""

    def __init__(self, is_interruption: Callable[[BaseException], bool] = is_interruption) -> None:
        """`is_interruption` tells exceptions of the script from the SDK's own."""
        self._is_interruption = is_interruption
        self.counts: Counter[str] = Counter()
        self._suppress = {stage: Suppress(self, stage) for stage in get_args(Stage)}
        self._unlogged: deque[tuple[int, str, tuple[object, ...]]] = deque()

    def suppress(self, stage: Stage) -> Suppress:
        """Return a context manager that counts and logs an exception instead of raising it.

        An exception that came from the script, such as its signal handler's, is raised.
        """
        return self._suppress[stage]

    def suppressing(self, stage: Stage, call: Callable[[T], object]) -> Callable[[T], None]:
        """Return a function that makes the call, and counts its exceptions in the same way."""

        def suppressed(argument: T) -> None:
            with self.suppress(stage):
                call(argument)

        return suppressed

    def passes(self, stage: Stage, error: BaseException) -> bool:
        """Return whether `error` came from the script and must be raised; count it if not."""
        try:
            passes = self._is_interruption(error)
        except RecursionError:  # too close to the limit to find out
            passes = error.__class__ is not RecursionError
        if not passes:
            self.count(stage, error)
        return passes

    def count(self, stage: Stage, error: BaseException) -> None:
        """Count one error; log the first of each stage, later."""
        self.counts[stage] += 1
        if self.counts[stage] == 1:
            text = f"{stage} failed and was skipped ({type(error).__name__}: {error})"
            self.log_later(logging.WARNING, "torchmem: %s", text)

    def log_later(self, level: int, message: str, *arguments: object) -> None:
        """Have the next `log_deferred` log a message.

        For calls inside the script's own code. A logging handler of the script may wait there for a
        lock that the script holds, or let another greenlet run.
        """
        self._unlogged.append((level, message, arguments))

    def log_deferred(self) -> None:
        """Log every message that has not been logged yet.

        For the background thread, and for calls that the script makes by name.
        """
        while self._unlogged:
            try:
                level, message, arguments = self._unlogged.popleft()
            except IndexError:  # another thread has logged the rest
                return
            log(level, message, *arguments)


class Suppress:
    """The context manager of `Errors.suppress`: a class, because it is cheaper to enter.

    It keeps no state, so one serves all threads and nested calls.
    """

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
        return error is not None and not self._errors.passes(self._stage, error)
