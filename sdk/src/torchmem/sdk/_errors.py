"""Where the SDK's own errors end: counted by stage, logged once, never raised into training."""

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
    """Counts of swallowed errors by stage."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(get_args(Stage), 0)
        self._unsaid: deque[str] = deque()
        self._in_the_midst = 0

    def swallow(self, stage: Stage) -> Swallow:
        """`with errors.swallow(stage):` counts whatever is raised inside, says it once for each stage, and goes on."""
        return Swallow(self, stage)

    def count(self, stage: Stage, error: BaseException) -> None:
        """Count one error; the first of its stage is logged."""
        self.counts[stage] += 1
        if self.counts[stage] == 1:
            self._unsaid.append(f"{stage} failed and is left out ({type(error).__name__}: {error})")
            if not self._in_the_midst:
                self.say()

    def quiet(self, call: Callable[[], None]) -> Callable[[], None]:
        """`call` for the main thread in the midst of its own code: what fails in it is logged by the next `say`.

        There the script may hold a lock that its own logging handler waits for, such as that of a queue.Queue.
        """

        def called() -> None:
            self._in_the_midst += 1
            try:
                call()
            finally:
                self._in_the_midst -= 1

        return called

    def say(self) -> None:
        """Log what has not been said yet."""
        with contextlib.suppress(IndexError):  # another thread has said the rest
            while self._unsaid:
                log.warning("torchmem: %s", self._unsaid.popleft())


class Swallow:
    """Nothing of ours may reach the training script; a class, as it is entered at every step."""

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
