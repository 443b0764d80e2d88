"""What a scenario is: a name, a sentence, a source, and a training loop on a simulated allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.card import CARD_BYTES, CONTEXT_BYTES

ScenarioEvent = Literal["compute", "step"]
"""Where the loop stands when it yields: while the GPU would be at work, or at the end of an optimizer step."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank of a simulated training job.

    `steps` is the length of the whole run in optimizer steps: the scenario unfolds over it, and goes on after it as
    long as it is asked to. `capacity` is what the allocator can get at the beginning, in bytes. The same seed, rank,
    steps and capacity give the same allocations.
    """

    allocator: DeviceCachingAllocator
    rank: int = 0
    world_size: int = 1
    steps: int = 1500
    seed: int = 0
    capacity: int = CARD_BYTES - CONTEXT_BYTES

    def progress(self, step: int) -> float:
        """The part of the run that is over before this step; beyond 1 when it goes on."""
        return step / self.steps

    @property
    def is_last(self) -> bool:
        """Whether this is the rank with the highest number."""
        return self.rank == self.world_size - 1

    def rng(self) -> Random:
        """The random numbers of this rank."""
        return Random(f"{self.seed}:{self.rank}")  # noqa: S311 -- a reproducible workload, not a secret


@dataclass(frozen=True, slots=True)
class Scenario:
    """A memory behaviour known from the field, acted out by the simulated allocator.

    `summary` says what happens, `reproduces` the published number at which the simulation arrives, `source` where it
    was published. `card_bytes` is the memory of the cards it is meant for, `neighbours` the number of other processes
    that may come to such a card (`CardUse.others`).

    `train` yields without end, several times in each step; whoever drives it decides how long a moment lasts. It
    raises `OutOfMemoryError` as a training script would.
    """

    name: str
    summary: str
    reproduces: str
    source: str
    train: Callable[[Worker], Iterator[ScenarioEvent]]
    card_bytes: int = CARD_BYTES
    neighbours: int = 0
