"""The experiment on histories in virtual time: its runs, and its figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from experiments.histories.__main__ import PATTERNS
from experiments.histories.dying import DYING
from experiments.histories.healthy import HEALTHY
from experiments.histories.job import SEEDS, Job, Pattern
from experiments.histories.play import Played, Said, play
from experiments.histories.score import jobs, score_dying, score_healthy, wrong

from torchmem.sample.run_history import Growth
from torchmem.sample.sample import ONSETS

LEAK = Growth("kept", 1024.0, 10, 1 << 30, is_leak=True)
SILENT = Said(100, None, None, is_seen=True, is_due=True)
SAID = replace(SILENT, growth=LEAK, steps_left=50.0)


def _played(pattern: Pattern, *said: Said) -> Played:
    return Played(Job(pattern, 400, 0.2, 0), list(said))


def test_patterns_are_many_and_seeds_are_used_once() -> None:
    """At least 16 patterns end and 14 do not, and the reported seeds chose no threshold."""
    assert len(DYING) >= 16
    assert len(HEALTHY) >= 14
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)
    assert not set(SEEDS["tune"]) & set(SEEDS["report"])
    assert all(set(pattern.onsets) <= set(ONSETS) for pattern in PATTERNS)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: str(pattern.name))
def test_runs_end_as_their_pattern_says(pattern: Pattern) -> None:
    """A dying run fails, and not long after its planned end; a healthy one never does."""
    run = play(Job(pattern, 400, 0.2, 7))

    if pattern.onsets:
        assert run.died is not None
        assert 100 <= run.died <= 500
    else:
        assert run.died is None
        assert run.said


def test_a_job_is_the_same_whenever_it_is_played() -> None:
    """Every size is decided by pattern, lengths and seed."""
    (first, *_) = jobs(DYING[:1], SEEDS["tune"])
    (again, *_) = jobs(DYING[:1], SEEDS["tune"])

    assert play(first).said == play(again).said


def test_growth_is_told_in_time_if_a_judgment_of_its_kind_comes_before_the_deadline() -> None:
    """Judgments after it do not count, nor runs that end before it."""
    pattern = replace(DYING[0], grows=("kept",))
    early = _played(pattern, SAID)
    early.worth, early.deadline = 90, 150
    late = _played(pattern, SILENT, replace(SAID, step=200))
    late.worth, late.deadline = 90, 150
    ended = _played(pattern, SILENT)
    ended.worth = 90

    assert score_dying([early, late, ended]).told == (1, 2)
    assert "not told by 150" in wrong(late)


def test_an_estimate_of_the_steps_left_may_be_off_by_three_tenths() -> None:
    """Of 60 steps left, 50 are right, and 20 are not."""
    run = _played(DYING[0], SAID, replace(SAID, steps_left=20.0))
    run.died = 161

    assert score_dying([run]).steps_left == (1, 2)


def test_leaks_that_are_said_of_healthy_runs_are_told_apart_by_what_was_seen() -> None:
    """Before its first period, a run that rises may be anything."""
    unseen = replace(SAID, is_seen=False)
    run = _played(HEALTHY[0], unseen, SAID, SILENT, SILENT)
    found = score_healthy([run])

    assert (found.leak, found.early, found.grows) == ((1, 3), (1, 1), (2, 4))
    assert "leak in 1 of 4 judgments" in wrong(run)
