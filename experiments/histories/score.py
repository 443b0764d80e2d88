"""Compares what is said of runs with what is true of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.histories.job import STEP_SECONDS, STEPS, Job, Pattern
from experiments.histories.play import Played, Said

MAX_ERROR = 0.3
"""An estimate of the steps left is right if it is off by this share of them at most."""
MIN_LEFT = 20
"""With fewer steps left, an estimate is not looked at."""

Pair = tuple[int, int]
"""A number, and of how many."""


@dataclass(frozen=True, slots=True)
class DyingScore:
    """Runs that end: those of which the onset is right, exactly or by a second answer.

    Attributes:
        exact: runs of which the onset is the exact one.
        onset: runs of which it is one of those that count as right.
        told: runs of which growth was told in time.
        steps_left: judgments that tell the steps until the end within MAX_ERROR, where the growth
            is even.
    """

    exact: Pair
    onset: Pair
    told: Pair
    steps_left: Pair


@dataclass(frozen=True, slots=True)
class HealthyScore:
    """Runs that do not end: pairs of what is wrong, and of how much.

    Attributes:
        leak: judgments that say leak after the run has shown its period or its level.
        early: those before.
        grows: judgments that say that anything grows, whenever.
        alerts: runs in which the alert fires after the run has shown its period or its level.
        early_alerts: runs in which it fires before.
    """

    leak: Pair
    early: Pair
    grows: Pair
    alerts: Pair
    early_alerts: Pair


def jobs(patterns: Iterable[Pattern], seeds: range) -> list[Job]:
    """Return every run of these patterns."""
    return [
        Job(pattern, steps, seconds, seed)
        for pattern in patterns
        for seconds in STEP_SECONDS
        for steps in STEPS
        for seed in seeds
    ]


def score_dying(runs: Sequence[Played]) -> DyingScore:
    """Return the figures of runs that end."""
    onsets = [(each.onset, each.job.pattern.onsets) for each in runs]
    estimates = [right for each in runs for right in _estimates(each)]
    return DyingScore(
        exact=_count(onset == right[0] for onset, right in onsets),
        onset=_count(onset in right for onset, right in onsets),
        told=_count(each.is_told for each in runs if each.is_told is not None),
        steps_left=_count(estimates),
    )


def _estimates(run: Played) -> list[bool]:
    """Return for each estimate of the steps left whether it is right."""
    if run.died is None or not run.job.pattern.is_even:
        return []
    return [
        abs(each.steps_left - left) <= MAX_ERROR * left
        for each in run.said
        if each.is_due and each.steps_left is not None
        for left in (run.died - 1 - each.step,)
        if left >= MIN_LEFT
    ]


def score_healthy(runs: Sequence[Played]) -> HealthyScore:
    """Return the figures of runs that do not end."""
    said = [each for run in runs for each in run.said]
    return HealthyScore(
        leak=_count(each.is_leak for each in said if each.is_seen),
        early=_count(each.is_leak for each in said if not each.is_seen),
        grows=_count(each.growth is not None for each in said),
        alerts=_count(run.alerted_late is not None for run in runs),
        early_alerts=_count(run.alerted != run.alerted_late for run in runs),
    )


def wrong(run: Played) -> str:
    """Return what is wrong with what was said of a run, in one line; "" if nothing is."""
    found = list(_wrong_end(run) if run.job.pattern.onsets else _wrong_life(run))
    return f"{run.job.name}: {'; '.join(found)}" if found else ""


def _wrong_end(run: Played) -> Iterable[str]:
    if run.died is None:
        yield "does not end, which is an error of the pattern"
    elif run.onset not in run.job.pattern.onsets:
        yield f"ends in step {run.died} with {run.onset}, true {'/'.join(run.job.pattern.onsets)}"
    if run.is_told is False:
        yield f"worth telling in step {run.worth}, not told by {run.deadline}"


def _wrong_life(run: Played) -> Iterable[str]:
    false = [each for each in run.said if each.is_seen and each.is_leak]
    if run.died is not None:
        yield "ends, which is an error of the pattern"
    if false:
        steps = _steps(false)
        yield f"leak in {len(false)} of {len(run.said)} judgments, steps {steps}"
    if run.alerted_late is not None:
        yield f"an alert in step {run.alerted_late}"


def _steps(said: Sequence[Said]) -> str:
    return f"{said[0].step} to {said[-1].step}"


def _count(answers: Iterable[bool | None]) -> Pair:
    known = [bool(answer) for answer in answers]
    return sum(known), len(known)
