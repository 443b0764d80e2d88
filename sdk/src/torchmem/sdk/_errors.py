"""Where the SDK's own errors end: counted by stage, logged once, never raised into training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Stage = Literal["stats", "snapshot", "step", "phase", "oom", "publish", "textfile", "endpoint", "setup", "exit"]
log = logging.getLogger("torchmem")


class Errors:
    """Counts of swallowed errors by stage."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(get_args(Stage), 0)

    @contextmanager
    def swallow(self, stage: Stage) -> Iterator[None]:
        """Count whatever is raised inside, say it once for each stage, and go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - nothing of ours may reach the training script
            self.count(stage, error)

    def count(self, stage: Stage, error: BaseException) -> None:
        """Count one error; the first of its stage is logged."""
        self.counts[stage] += 1
        if self.counts[stage] == 1:
            log.warning("torchmem: %s failed and is left out (%s: %s)", stage, type(error).__name__, error)
