"""A job in virtual time: its sizes by its seed, and what it needs in each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

GIB = 1 << 30
GPU_GIB = (8, 16, 24, 40, 80, 141)
STEP_SECONDS = (0.005, 0.2, 5.0)
STEPS = (400, 2000, 8000)
SEEDS = {"tune": range(4), "report": range(100, 104)}


class Step(NamedTuple):
    """What one step does. Sizes are shares of the room, which is what the job can have at most.

    Attributes:
        kept: what is allocated at the step's end, beside the model's own memory.
        need: what the step needs at its peak, beside what was kept.
        lingering: the share of `need` that is still allocated at the step's end.
        outside: what was taken outside the allocator since the run began.
        stranded: what is free, but useless for a large request.
        grown: what has grown so far and will not stop, without what the run's ordinary variation
            hides. 0 before it can be known, as before the third of several stairs.
        is_seen: whether the run has shown its first period, or the level that it returns to.
        is_caught: whether it runs out of memory, and goes on.
    """

    kept: float = 0.0
    need: float = 0.0
    lingering: float = 0.0
    outside: float = 0.0
    stranded: float = 0.0
    grown: float = 0.0
    is_seen: bool = True
    is_caught: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a pattern.

    Attributes:
        pattern: what it does.
        steps: steps that it is planned for. A dying one ends about there.
        step_seconds: the mean length of a step.
        seed: decides its sizes.
        random: draws from it; the same for the same job.
        total: bytes of the GPU.
        model: share of the room for parameters, gradients and the optimizer's state.
        need: share of the room for a usual step.
    """

    pattern: Pattern
    steps: int
    step_seconds: float
    seed: int
    random: random.Random = field(init=False)
    total: int = field(init=False)
    model: float = field(init=False)
    need: float = field(init=False)

    def __post_init__(self) -> None:
        """Draw the sizes."""
        generator = random.Random(self.name)  # noqa: S311
        drawn = {
            "random": generator,
            "total": generator.choice(GPU_GIB) * GIB,
            "model": generator.uniform(0.1, 0.3),
            "need": generator.uniform(0.15, 0.3),
        }
        for name, value in drawn.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.pattern.name} {self.step_seconds} s x {self.steps}, seed {self.seed}"

    @property
    def room(self) -> float:
        """What model and usual steps leave."""
        return 1 - self.model - self.need

    def varied(self, size: float, share: float) -> float:
        """Return a size that differs by this share at most."""
        return size * self.random.uniform(1 - share, 1 + share)

    def usual(self) -> float:
        """Return the need of a usual step: batches of about the same size."""
        return self.need * self.random.uniform(0.98, 1.0)


@dataclass(frozen=True, slots=True)
class Pattern:
    """What happens in a run.

    Attributes:
        name: a few words.
        steps: yields each step.
        onsets: the true onsets of its end; the first is the exact one, and the others count as
            right too. Empty for a run that does not end.
        grows: the kinds of growth that are true of it; empty if nothing grows steadily.
        is_even: whether its pace is the same from its beginning to its end.
    """

    name: str
    steps: Callable[[Job], Iterator[Step]]
    onsets: tuple[str, ...] = ()
    grows: tuple[str, ...] = ()
    is_even: bool = False
