"""The largest value of an option of the script with which it fits.

One run for each of several ranks or world sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchmem.preflight.attempts import Attempts, failure
from torchmem.preflight.outcome import Outcome
from torchmem.preflight.plan import Placement, Plan
from torchmem.preflight.verdict import tightest
from torchmem.preflight.wanted import Search, with_option
from torchmem.sample.errors import TorchmemError


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
        outcome = attempts.quietly(
            replace(plan, command=command), f"phantom, {search.option} {value}"
        )
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


@dataclass(frozen=True, slots=True)
class Place:
    """One rank and what became of it; `error` says why there is no verdict."""

    placement: Placement
    outcome: Outcome
    error: TorchmemError | None

    @property
    def fits(self) -> bool | None:
        """Whether it came through; None when there is no verdict."""
        return None if self.error else self.outcome.ended != "oom"


@dataclass(frozen=True, slots=True)
class Sweep:
    """All of them, in the order asked for."""

    plan: Plan
    places: tuple[Place, ...]

    @property
    def exit_code(self) -> int:
        """1 when one does not fit, else 2 when one has no verdict, else 0."""
        if any(place.fits is False for place in self.places):
            return 1
        return next((place.error.exit_code for place in self.places if place.error), 0)


def sweep(plan: Plan, placements: Sequence[Placement], attempts: Attempts) -> Sweep:
    """Try each placement; one that fails hides none of the others."""
    places = []
    for placement in placements:
        label = f"phantom, rank {placement.rank} of {placement.world_size:,}"
        outcome = attempts.quietly(replace(plan, placement=placement), label)
        places.append(Place(placement, outcome, failure(outcome)))
    return Sweep(plan, tuple(places))
