"""What the live page says first of a rank of each demo scenario, read every five seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
from support.demo_in_time import LIMITS, SECONDS, Look, looks
from support.simulated_time import RANKS

from torchmem.node.state import RankState
from torchmem.sample.sample import LIVE_STATES
from torchmem.simulator.scenarios import SCENARIOS

EVERY_SECONDS = 5.0
GRACE_STEPS = 60
"""Growth is reported at most this many steps after it becomes worth reporting."""
MATTERS = 0.25
"""In a rank that retries, stranding more than this share of the GPU is the main problem."""
HALF = 0.5
"""Growth is worth a sentence once it has taken this share of the room that there was."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What a scenario is about: the kinds of sentences that name it, and since when it is worth it.

    `is_worth` is asked about the first look of a rank and about each later one.
    """

    kinds: frozenset[str]
    is_worth: Callable[[Look, Look], bool]


def _total(look: Look) -> int:
    return look.device.total_bytes or 0


def _retries(_: Look, look: Look) -> bool:
    return bool(look.device.counters.alloc_retries)


def _strands(first: Look, look: Look) -> bool:
    layout = look.device.layout
    is_much = layout is not None and layout.stranded_bytes > MATTERS * _total(look)
    return is_much and _retries(first, look)


def _driver_is_empty(_: Look, look: Look) -> bool:
    return (look.device.driver_free_bytes or 0) < LIMITS.gpu_library_bytes


def _left(look: Look) -> int:
    """Return what the highest peak so far and what is outside the allocator leave of the GPU."""
    allocator = look.device.allocator
    peak = allocator.active_peak_bytes if allocator else None
    reserved = allocator.reserved_bytes.total if allocator else 0
    return (look.device.driver_free_bytes or 0) + reserved - (peak or 0)


def _half_is_gone(first: Look, look: Look) -> bool:
    return _left(look) < HALF * _left(first)


SUBJECTS: Mapping[str, Subject] = {
    "fragmentation": Subject(frozenset({"fragmentation"}), _strands),
    "retry-storm": Subject(frozenset({"retries", "library", "capacity"}), _retries),
    "phase-change": Subject(frozenset({"retries", "fragmentation"}), _retries),
    "neighbor": Subject(frozenset({"library", "capacity", "external"}), _driver_is_empty),
    "leak": Subject(frozenset({"leak"}), _half_is_gone),
    "imbalanced-ranks": Subject(frozenset({"larger_step"}), _half_is_gone),
    "colocated": Subject(frozenset({"outside"}), _half_is_gone),
}
"""Nothing threatens a rank of the other scenarios."""
EARLIER = {
    "fragmentation": {"fragmentation", "retries", "larger_step"},
    "leak": {"kept"},
    "neighbor": {"capacity"},
}
"""What may be said before it is worth it, beside the subject's own sentence."""
RUNS = [(name, rank) for name in SCENARIOS for rank in (0, RANKS - 1)]


def _shown(name: str, rank: int) -> Iterator[tuple[Look, RankState]]:
    """Yield what the page shows of a living rank, from its first steps on."""
    for look in looks(name, rank, SECONDS, EVERY_SECONDS):
        if look.state in LIVE_STATES and look.sample.steps.count:
            (shown,) = look.page.gpus[rank].ranks
            yield look, shown


@pytest.mark.parametrize(("name", "rank"), RUNS)
def test_it_names_the_subject_of_the_scenario(name: str, rank: int) -> None:
    """From the moment that it is worth it until the end; before it, it names nothing else."""
    subject, seen = SUBJECTS.get(name), list(_shown(name, rank))
    since: int | None = None
    for look, shown in seen:
        kind = shown.why[0].kind if shown.why else None
        if subject is None:
            assert kind is None
            continue
        if since is None and subject.is_worth(seen[0][0], look):
            since = look.sample.steps.count
        grace = GRACE_STEPS if subject.is_worth is _half_is_gone else 0
        if since is None or look.sample.steps.count < since + grace:
            assert kind is None or kind in subject.kinds | EARLIER.get(name, set())
        else:
            assert kind in subject.kinds


@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_a_rank_of_the_scenario_reaches_it(name: str) -> None:
    """In each scenario with a subject, it is worth it in one of the ranks at least."""
    reached = [
        SUBJECTS[name].is_worth(seen[0][0], look)
        for seen in (list(_shown(name, 0)), list(_shown(name, RANKS - 1)))
        for look, _ in seen
    ]
    assert any(reached)
