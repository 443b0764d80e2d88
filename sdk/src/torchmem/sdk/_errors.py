"""Where the SDK's own errors end: counted by stage, logged once, never raised into training."""

from __future__ import annotations

import logging
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

    def swallow(self, stage: Stage) -> Swallow:
        """`with errors.swallow(stage):` counts whatever is raised inside, says it once for each stage, and goes on."""
        return Swallow(self, stage)

    def count(self, stage: Stage, error: BaseException) -> None:
        """Count one error; the first of its stage is logged."""
        self.counts[stage] += 1
        if self.counts[stage] == 1:
            log.warning("torchmem: %s failed and is left out (%s: %s)", stage, type(error).__name__, error)


class Swallow:
    """Nothing of ours may reach the training script; a class, as it is entered at every step."""

    __slots__ = ("_errors", "_stage")

    def __init__(self, errors: Errors, stage: Stage) -> None:
        self._errors = errors
        self._stage = stage

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self._errors.count(self._stage, error)
        return True
