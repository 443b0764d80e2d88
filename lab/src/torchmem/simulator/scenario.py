"""The parts of a scenario: its description, its training loop, and the rank that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.gpu import CONTEXT_BYTES, GPU_BYTES

ScenarioEvent = Literal["compute", "step"]
"""Where a training loop yields: while the GPU would compute, or at the end of an optimizer step."""


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """One rank of a simulated training job.

    `steps` is the length of the run in optimizer steps; the scenario unfolds over it, and continues
    after it for as long as it is driven. `capacity` is what the allocator can get at the start, in
    bytes; `weights` are the parameters that it trains. Equal seeds, ranks, steps and capacities
    produce equal allocations.
    """

    allocator: DeviceCachingAllocator
    rank: int = 0
    world_size: int = 1
    steps: int = 1500
    seed: int = 0
    capacity: int = GPU_BYTES - CONTEXT_BYTES
    weights: list[Block] = field(default_factory=list)

    def progress(self, step: int) -> float:
        """Return the share of the run before this step; more than 1 after its end."""
        return step / self.steps

    @property
    def is_last(self) -> bool:
        """Whether this is the rank with the highest number."""
        return self.rank == self.world_size - 1

    def rng(self) -> Random:
        """Return the random numbers of this rank."""
        return Random(f"{self.seed}:{self.rank}")  # noqa: S311 -- a workload, not a secret

    def malloc_many(self, count: int, size: int) -> list[Block]:
        """Allocate `count` blocks of `size` bytes each."""
        return [self.allocator.malloc(size) for _ in range(count)]

    def malloc_weights(self, count: int, size: int) -> None:
        """Allocate `count` parameters of `size` bytes each."""
        self.weights.extend(self.malloc_many(count, size))

    def free_many(self, blocks: Iterable[Block]) -> None:
        """Free blocks in the given order."""
        for block in blocks:
            self.allocator.free(block)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A memory behavior known from the field, reproduced by the simulated allocator.

    `summary` describes what happens, `reproduces` the published number, `source` where it was
    published, and `simulated` the number that the simulation reaches. `gpu_bytes` is the memory of
    the GPUs that it is made for, and `neighbors` the number of other processes that may use such a
    GPU (`GpuUse.others`).

    `train` yields forever, several times in each step; its driver decides how long each event
    lasts. It raises `OutOfMemoryError` as a training script would.
    """

    name: str
    summary: str
    reproduces: str
    source: str
    simulated: str
    train: Callable[[SimulatedRank], Iterator[ScenarioEvent]]
    gpu_bytes: int = GPU_BYTES
    neighbors: int = 0
