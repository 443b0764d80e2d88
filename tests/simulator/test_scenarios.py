"""The scenarios act out what they promise, by the allocator's own behaviour."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.sizes import GIB, MIB
from torchmem.sample.sample import Layout
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.card import CARD_BYTES, SimulatedCard
from torchmem.simulator.errors import OutOfMemoryDetails, OutOfMemoryError
from torchmem.simulator.scenarios import SCENARIOS, Worker

STEPS = 400
RANKS = 2


@dataclass
class Course:
    """What one rank went through: a reading at each moment of each step, and how it ended."""

    layouts: list[tuple[int, Layout]] = field(default_factory=list)
    retries: list[int] = field(default_factory=list)
    steps: int = 0
    stats: dict[str, int] = field(default_factory=dict)
    oom: OutOfMemoryDetails | None = None


def play(name: str, rank: int, steps: int, *, seed: int = 0, every: int = 8) -> Course:
    """Run one rank for `steps` steps, or until it runs out of memory; read it in every `every`th step."""
    allocator = DeviceCachingAllocator(SimulatedCard())
    course = Course()
    try:
        for moment in SCENARIOS[name].train(Worker(allocator, rank, RANKS, STEPS, seed)):
            if course.steps % every == 0:
                course.layouts.append((course.steps, measure(allocator.memory_snapshot(), 0, 0.0)))
            if moment == "step":
                course.steps += 1
                course.retries.append(allocator.memory_stats_as_nested_dict()["num_alloc_retries"])
            if course.steps == steps:
                break
    except OutOfMemoryError as error:
        course.oom = error.details
    nested = allocator.memory_stats_as_nested_dict()
    course.stats = {
        name: nested[name]["all"]["peak"] for name in ("active_bytes", "reserved_bytes")
    }
    return course


@pytest.fixture(scope="module")
def doomed() -> Course:
    """The last rank of `fragmentation`."""
    return play("fragmentation", RANKS - 1, STEPS)


@pytest.fixture(scope="module")
def survivor() -> Course:
    """The first rank of `fragmentation`, for half as long again as the run is meant to last."""
    return play("fragmentation", 0, STEPS * 3 // 2)


def test_one_rank_runs_out_with_memory_to_spare(doomed: Course) -> None:
    """The last rank dies at 60 to 70 % of the run, refused a piece a hundredth as large as its free memory."""
    assert doomed.oom is not None
    assert 0.6 <= doomed.steps / STEPS <= 0.7
    assert doomed.oom.requested < 200 * MIB
    assert doomed.oom.unallocated > 25 * GIB
    assert doomed.oom.free < doomed.oom.requested


def test_fragmentation_rises_and_stays(doomed: Course) -> None:
    """FI and stranded memory start low; for the last half of its life FI is above 0.7, and 25 % of the card lost."""
    half = [layout for step, layout in doomed.layouts if step >= doomed.steps / 2]
    assert min(layout.fragmentation_ratio or 0 for layout in half) > 0.7
    _, start = doomed.layouts[0]
    assert (start.fragmentation_ratio or 0) < 0.1
    assert start.stranded_bytes < 0.05 * CARD_BYTES
    ends = [layout for step, layout in doomed.layouts[3::4] if step >= doomed.steps / 2]
    assert min(layout.stranded_bytes for layout in ends) > 0.25 * CARD_BYTES


def test_retries_rise_until_the_end(doomed: Course) -> None:
    """Retries begin in the first third of the run, and from then on no eighth of the run passes without one."""
    first = next(step for step, count in enumerate(doomed.retries) if count)
    assert first < STEPS / 3
    window = STEPS // 8
    later = doomed.retries[first:]
    assert all(before < after for before, after in zip(later, later[window:], strict=False))


def test_the_other_ranks_live_on(survivor: Course) -> None:
    """A rank that is not the last never runs out, and keeps having a retry now and then."""
    assert survivor.oom is None
    assert survivor.retries[STEPS // 3] < survivor.retries[STEPS] < survivor.retries[-1]


def test_a_run_is_decided_by_its_seed() -> None:
    """The same seed gives the same readings; another seed or another rank gives others."""
    first, again = (play("fragmentation", 0, 30, seed=1).layouts for _ in range(2))
    assert first == again
    assert first != play("fragmentation", 0, 30, seed=2).layouts
    assert first != play("fragmentation", 1, 30, seed=1).layouts


@pytest.mark.parametrize("rank", range(RANKS))
def test_healthy_slack_is_harmless(rank: int) -> None:
    """31 to 43 % of the reserved peak is slack and FI is near 1, with every segment releasable and no retry."""
    course = play("healthy-slack", rank, STEPS, every=20)
    assert course.oom is None
    assert course.retries[-1] == 0
    assert 0.31 <= 1 - course.stats["active_bytes"] / course.stats["reserved_bytes"] <= 0.43
    ends = [layout for _, layout in course.layouts[1::2]]
    assert {0} == {layout.stranded_bytes for layout in ends}
    assert (ends[-1].fragmentation_ratio or 0) > 0.9


def test_every_scenario_describes_itself() -> None:
    """A scenario has a name, one sentence, and a source for its number."""
    for name, scenario in SCENARIOS.items():
        assert name == scenario.name
        assert re.fullmatch(r"[A-Z\d][^.]+\.", scenario.summary.replace("cuda.", ""))
        assert re.search(r"\d|two|twice", scenario.reproduces)
        assert scenario.source
