"""What the demo shows of each scenario, in simulated time: possible numbers, and true sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from support.demo_in_time import EVERY_SECONDS, Look, looks
from support.simulated_time import RANKS

from torchmem.demo.gpus import STEP_SECONDS
from torchmem.explain.parts import PartBytes
from torchmem.sample.sample import LIVE_STATES
from torchmem.simulator.scenarios import SCENARIOS

RUNS = [(name, rank) for name in SCENARIOS for rank in (0, RANKS - 1)]
STRANDS = {"fragmentation", "phase-change"}
"""Scenarios of stranded memory."""
GROWS = {
    "leak": "leak",
    "fragmentation": "larger_step",
    "imbalanced-ranks": "larger_step",
    "colocated": "outside",
}
"""What grows from step to step. Nothing does in the other scenarios."""
FULL_IN = re.compile(r"full in about ([\d,]+) steps")
FLAT_LOOKS = 5
"""After this many looks, more than 50 steps, a growth that has ended must no longer be told."""
MATTERS = 0.25
"""In a rank that retries, stranding more than this share of the GPU is the main problem."""


def living(name: str, rank: int) -> list[Look]:
    """Return the looks while the rank runs, without the first one, when nothing is known."""
    return [look for look in looks(name, rank) if look.state in LIVE_STATES][1:]


def total(parts: tuple[PartBytes, ...]) -> int:
    assert min((part.bytes for part in parts), default=0) >= 0
    return sum(part.bytes for part in parts)


@pytest.mark.parametrize(("name", "rank"), RUNS)
def test_all_memory_adds_up(name: str, rank: int) -> None:
    """At every moment, the parts of every GPU and of every rank are possible and add up."""
    seen = looks(name, rank)
    for look in seen:
        for memory in look.memory:
            assert min(memory.used, memory.free, memory.reserved or 0) >= 0
            assert memory.used + memory.free + (memory.reserved or 0) == memory.total
        for gpu in look.page.gpus:
            assert total(gpu.parts) == gpu.total_bytes
        assert 0 <= look.reserved <= look.used <= look.memory[rank].used
        for shown in look.page.gpus[rank].ranks:
            outside = shown.outside_allocator_bytes or 0
            assert total(shown.parts) == (shown.reserved_bytes or 0) + outside
    assert len({memory.total for look in seen for memory in look.memory}) <= 2


@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_fragmentation_is_called_by_its_name(rank: int) -> None:
    """No living rank is told of a leak; once much is stranded, that is said first to the end."""
    seen = living("fragmentation", rank)
    assert "leak" not in {item.onset for look in seen for item in look.threats}

    late = list(_since_it_matters(seen))
    assert len(late) > len(seen) / 2
    assert {look.threats[0].cause for look in late} == {"fragmentation"}
    assert {"expandable" in look.advice[0].text for look in late} == {True}
    words = {look.page.gpus[rank].ranks[0].why[0].text.split()[0] for look in late}
    assert words == {"Fragmentation:"}


def _since_it_matters(seen: list[Look]) -> Iterator[Look]:
    for look in seen:
        layout, retries = look.device.layout, look.device.counters.alloc_retries
        total_bytes = look.device.total_bytes or 0
        if retries and layout and layout.stranded_bytes >= MATTERS * total_bytes:
            yield look


@pytest.mark.parametrize(("name", "rank"), RUNS)
def test_what_is_said_of_the_living_is_the_scenario(name: str, rank: int) -> None:
    """Growth and fragmentation are told only in the scenarios that have them."""
    told = [item for look in living(name, rank) for item in look.threats]

    assert {item.onset for item in told if item.onset} <= {GROWS.get(name)}
    assert ("fragmentation" in {item.cause for item in told}) <= (name in STRANDS)


@pytest.mark.parametrize(("name", "rank"), [("leak", 0), ("leak", 1), ("imbalanced-ranks", 0)])
def test_what_grows_is_told(name: str, rank: int) -> None:
    """The growth of a scenario is the first thing that is said in the later half of its run."""
    seen = living(name, rank)
    later = seen[len(seen) // 2 :]
    assert {look.threats[0].onset for look in later if look.threats} == {GROWS[name]}
    assert sum(bool(look.threats) for look in later) > 0.8 * len(later)


@pytest.mark.parametrize(("name", "rank"), RUNS)
def test_what_is_flat_is_no_leak(name: str, rank: int) -> None:
    """A leak is told only while parameters, optimizer and other tensors grow."""
    seen = living(name, rank)
    for before, look in zip(seen, seen[FLAT_LOOKS:], strict=False):
        if "leak" in {item.onset for item in look.threats}:
            assert _kept(look) > _kept(before)


def _kept(look: Look) -> int:
    parts = look.device.components
    return sum(parts.get(name, 0) for name in ("parameters", "optimizer_state", "held"))


@pytest.mark.parametrize(("name", "rank"), RUNS)
def test_when_the_gpu_is_full(name: str, rank: int) -> None:
    """A rank runs out of memory within a factor of two of the steps that it says, or later."""
    seen = looks(name, rank)
    last = seen[-1].sample.steps.count
    has_died = seen[-1].state == "oom"
    for look in living(name, rank):
        for item in look.threats:
            told = FULL_IN.search(item.text)
            if told:
                steps, left = int(told[1].replace(",", "")), last - look.sample.steps.count
                margin = 5 * EVERY_SECONDS / STEP_SECONDS
                assert steps > left / 2 - margin
                assert steps < 2 * left + margin or not has_died


def test_nothing_is_said_twice() -> None:
    """Every sentence of a rank is said once."""
    for name, rank in RUNS:
        for look in living(name, rank):
            texts = [item.text for item in look.threats]
            assert not any(one == other for one, other in pairwise(sorted(texts)))
