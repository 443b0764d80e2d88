"""One run of several, and whether its memory suffices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchmem.preflight.growth import deciding_growth
from torchmem.preflight.result import RunResult
from torchmem.sample.errors import UsageError


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run whose memory may also be unknown, because it has no verdict."""

    result: RunResult

    @property
    def error(self) -> UsageError | None:
        """Why there is no verdict, or None."""
        return self.result.error

    @property
    def fits(self) -> bool | None:
        """Whether memory suffices, also if it grows; None if there is no verdict."""
        if self.error:
            return None
        return self.result.ended != "oom" and deciding_growth(self.result) is None


def all_fit(runs: Sequence[JudgedRun]) -> bool | None:
    """Return whether all runs fit; None if none of them does not, but one has no verdict."""
    found = {run.fits for run in runs}
    return False if False in found else None if None in found else True


def exit_code(runs: Sequence[JudgedRun]) -> int:
    """Return 1 if a run does not fit, else 2 if a run has no verdict, else 0."""
    if all_fit(runs) is False:
        return 1
    return next((run.error.exit_code for run in runs if run.error), 0)
