"""The history of a whole run on one device: a few points from its first step to its latest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import le
from typing import Literal

MAX_POINTS = 64
"""The most points in a history; those of a full one are spread over the run."""
NEWEST_POINTS = 24
"""The newest points, all of which are kept: they show what has begun lately."""

GrowthKind = Literal["kept", "larger_step", "outside"]
GrowthOnset = Literal["leak", "larger_step", "outside"]


@dataclass(frozen=True, slots=True)
class RunHistory:
    """One value per point in time, oldest first; bytes, None where unknown.

    Attributes:
        steps: steps that had ended.
        seconds: time since the first point.
        allocated_bytes: allocated bytes at a step's end. A process without steps has no points.
        peak_bytes: the highest active bytes so far.
        stranded_bytes: stranded bytes in the latest snapshot.
        outside_bytes: bytes that were neither free at the driver nor reserved by this process.
        kept_bytes: what the components that are kept between steps add up to, at a step's end.
        first_components: what the allocated bytes consisted of at a step's end, soon after the
            first steps.
        last_components: the same at the latest step's end for which it is known.
    """

    steps: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    allocated_bytes: tuple[int, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    stranded_bytes: tuple[int | None, ...] = ()
    outside_bytes: tuple[int | None, ...] = ()
    kept_bytes: tuple[int | None, ...] = ()
    first_components: dict[str, int] = field(default_factory=dict)
    last_components: dict[str, int] = field(default_factory=dict)

    @property
    def columns(self) -> Sequence[str]:
        """The names of the fields that have a value for each point."""
        return [name for name in self.__slots__ if isinstance(getattr(self, name), tuple)]

    @property
    def is_consistent(self) -> bool:
        """Whether the columns have the same length, and time and steps never go back."""
        lengths = {len(getattr(self, name)) for name in self.columns}
        ordered = all(_is_ordered(column) for column in (self.steps, self.seconds))
        return ordered and len(lengths) == 1 and len(self.steps) <= MAX_POINTS


def _is_ordered(values: Sequence[float]) -> bool:
    return all(map(le, values, values[1:]))


@dataclass(frozen=True, slots=True)
class Growth:
    """What grows from step to step in a rank that runs.

    Attributes:
        kind: what is kept between steps, what a step needs beside it (larger_step), or what is
            outside the allocator.
        bytes_per_step: the pace.
        since_step: the steps that had ended when it began.
        grown_bytes: the growth so far.
        component: the component that grew most, where it is known.
        is_leak: whether what is kept leaks: nothing healthy that this run has shown explains it.
    """

    kind: GrowthKind
    bytes_per_step: float
    since_step: int
    grown_bytes: int
    component: str | None = None
    is_leak: bool = False

    @property
    def onset(self) -> GrowthOnset:
        """The onset of an OutOfMemoryError that it causes."""
        return "leak" if self.kind == "kept" else self.kind
