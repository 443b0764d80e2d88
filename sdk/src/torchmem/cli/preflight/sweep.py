"""One run for each of several ranks or world sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmem.cli.preflight.attempts import Attempts, failure
from torchmem.core.errors import TorchmemError
from torchmem.preflight.outcome import Outcome
from torchmem.preflight.plan import Placement, Plan


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
