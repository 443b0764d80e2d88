"""Plays a scenario on simulated cards, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.card import CardUse, SimulatedCard
from torchmem.simulator.errors import OutOfMemoryDetails, OutOfMemoryError
from torchmem.simulator.scenarios import SCENARIOS, Worker

RANKS = 2


@dataclass(frozen=True)
class Step:
    """The allocator at the end of a step, in bytes; peaks are those of the step, retries all until then."""

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    retries: int


@dataclass
class Course:
    """What one rank went through, and how it ended."""

    allocator: DeviceCachingAllocator
    steps: list[Step] = field(default_factory=list)
    oom: OutOfMemoryDetails | None = None

    @property
    def slack_at_peak(self) -> float:
        """1 - highest allocated / highest reserved bytes."""
        return 1 - max(s.allocated_peak for s in self.steps) / max(
            s.reserved_peak for s in self.steps
        )


def new_allocator(name: str, share: float = 1.0) -> DeviceCachingAllocator:
    """The allocator of a process that is alone on a card of this scenario, of which CUDA has `share` to give."""
    scenario = SCENARIOS[name]
    use = CardUse([0] * (1 + scenario.neighbors))
    return DeviceCachingAllocator(SimulatedCard(int(share * scenario.card_bytes), use=use))


def play(
    name: str,
    rank: int,
    steps: int,
    *,
    seed: int = 0,
    beyond: float = 1.2,
    allocator: DeviceCachingAllocator | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Course:
    """Run one rank of two until `beyond` times the run's length, or until it runs out of memory."""
    allocator = allocator or new_allocator(name)
    course = Course(allocator)
    worker = Worker(allocator, rank, RANKS, steps, seed, allocator.card.mem_get_info()[0])
    try:
        for moment in SCENARIOS[name].train(worker):
            if moment == "step":
                course.steps.append(_step(allocator))
                on_step()
            if len(course.steps) >= beyond * steps:
                break
    except OutOfMemoryError as error:
        course.oom = error.details
    return course


def _step(allocator: DeviceCachingAllocator) -> Step:
    stats = allocator.memory_stats_as_nested_dict()
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    allocator.reset_peak_memory_stats()
    return Step(
        allocated["current"],
        allocated["peak"],
        reserved["current"],
        reserved["peak"],
        stats["num_alloc_retries"],
    )
