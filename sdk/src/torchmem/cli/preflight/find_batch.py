"""The largest value of an option of the script with which it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torchmem.cli.preflight.attempts import Attempts, failure
from torchmem.cli.preflight.command import with_option
from torchmem.cli.preflight.verdict import tightest
from torchmem.cli.preflight.wanted import Search
from torchmem.preflight.outcome import Outcome
from torchmem.preflight.plan import Plan


@dataclass(frozen=True, slots=True)
class Try:
    """One value and what it led to."""

    value: int
    outcome: Outcome

    @property
    def fits(self) -> bool:
        """Whether the run came through."""
        return self.outcome.ended != "oom"


@dataclass(frozen=True, slots=True)
class Found:
    """Every value that was run, in ascending order. best: the largest that fits; None when not even the lowest does."""

    plan: Plan
    search: Search
    tries: tuple[Try, ...]

    @property
    def best(self) -> Try | None:
        """The largest that fits."""
        return max((one for one in self.tries if one.fits), key=lambda one: one.value, default=None)

    @property
    def bytes_per_unit(self) -> int | None:
        """How much the peak of allocated memory grows with each one more; None unless two values fit."""
        fitting = [one for one in self.tries if one.fits]
        if len(fitting) < 2:
            return None
        first, last = fitting[0], fitting[-1]
        grown = tightest(last.outcome).peak_allocated - tightest(first.outcome).peak_allocated
        return grown // (last.value - first.value)


def find_batch(plan: Plan, search: Search, attempts: Attempts) -> Found:
    """Search by halves, taking it that a larger value needs more; raises the error of a run without a verdict."""
    tries: dict[int, Try] = {}

    def fits(value: int) -> bool:
        command = with_option(plan.command, search.option, value)
        outcome = attempts.quietly(replace(plan, command=command), f"phantom, {search.option} {value}")
        error = failure(outcome)
        if error is not None:
            raise error
        tries[value] = Try(value, outcome)
        return tries[value].fits

    _halve(search.low, search.high, fits)
    return Found(plan, search, tuple(tries[value] for value in sorted(tries)))


def _halve(low: int, high: int, fits: Callable[[int], bool]) -> None:
    """Ask until the largest value that fits and the one above it have been asked for."""
    if not fits(low) or low == high or fits(high):
        return
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
