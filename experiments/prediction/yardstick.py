"""Rate a prediction: which OOMs it predicts in time, and how often it is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from experiments.prediction.jobs import Group, Likeness
from experiments.prediction.promql import Evaluation
from experiments.prediction.recordings import EARLIER_PID, SCRAPE_SECONDS, Labels, Recording

EARLIEST_SECONDS = 3600.0
"""A warning that ends longer before the OutOfMemoryError does not tell of it."""
AHEAD_SECONDS = (120.0, 600.0)
"""How long before the OutOfMemoryError a warning is in time."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert and the recording rules that it needs, in the order of their evaluation."""

    name: str
    alert: str
    for_seconds: float
    records: tuple[dict[str, Any], ...] = ()
    keep_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rule did in one job.

    `told` is whether it fired in the last hour until each of AHEAD_SECONDS before the end; `starts`
    is how often it began to fire, and `true_starts` how many of those an end followed within an
    hour. `ahead` is how long before its end it first did, in seconds; None if it did not.
    """

    kind: str
    group: Group
    hours: float
    died: bool
    told: tuple[bool, ...]
    starts: int
    true_starts: int
    firing_hours: float
    ahead: float | None = None
    likeness: Likeness = "first"


def firing(rule: Rule, evaluation: Evaluation) -> dict[Labels, npt.NDArray[np.bool_]]:
    """Return at which scrapes the alert of a rule fires, by the labels of its expression."""
    for record in rule.records:
        evaluation.record(
            record["record"],
            record["expr"],
            record.get("labels", {}),
            round(record.get("interval_seconds", SCRAPE_SECONDS) / SCRAPE_SECONDS),
        )
    fires = {}
    for labels, values in evaluation.vector(rule.alert).items():
        active = ~np.isnan(values)
        held = _held(active, round(rule.for_seconds / SCRAPE_SECONDS))
        fires[labels] = _kept(held, active, round(rule.keep_seconds / SCRAPE_SECONDS))
    return fires


def fires_in_job(rule: Rule, recording: Recording) -> npt.NDArray[np.bool_]:
    """Return at which scrapes of a job, from its first to its last, a rule fires."""
    firing_at = np.zeros(recording.scrapes, dtype=bool)
    for labels, fires in firing(rule, Evaluation(recording.series, recording.scrapes)).items():
        if ("pid", EARLIER_PID) not in labels:
            firing_at |= fires
    return firing_at[recording.begins : recording.ends]


def _held(active: npt.NDArray[np.bool_], scrapes: int) -> npt.NDArray[np.bool_]:
    """Return where a condition has held for this many scrapes more."""
    held: npt.NDArray[np.bool_] = active.copy()
    held[:scrapes] = False
    for shift in range(1, min(scrapes, len(active) - 1) + 1):
        held[shift:] &= active[:-shift]
    return held


def _kept(
    held: npt.NDArray[np.bool_], active: npt.NDArray[np.bool_], scrapes: int
) -> npt.NDArray[np.bool_]:
    """Return where an alert fires that goes on for `scrapes` after its condition last held.

    This is `keep_firing_for`: once the alert fires, its condition alone extends it.
    """
    fires: npt.NDArray[np.bool_] = held.copy()
    last = -1
    for number in range(len(held)):
        if held[number] or (active[number] and number and fires[number - 1]):
            fires[number], last = True, number
        elif last >= 0 and number and fires[number - 1]:
            fires[number] = number - last <= scrapes
    return fires


def outcome(
    kind: str,
    group: Group,
    recording: Recording,
    fires: npt.NDArray[np.bool_],
    likeness: Likeness = "first",
) -> Outcome:
    """Compare when an alert fired in a job with how the job ended."""
    begins = np.flatnonzero(fires & ~np.concatenate([[False], fires[:-1]]))
    true_starts, first_ahead = 0, None
    told = tuple(False for _ in AHEAD_SECONDS)
    if recording.died is not None:
        died = len(fires) - 1
        earliest = max(0, died - round(EARLIEST_SECONDS / SCRAPE_SECONDS))
        latest = [died - round(ahead / SCRAPE_SECONDS) for ahead in AHEAD_SECONDS]
        told = tuple(bool(fires[earliest : max(0, last + 1)].any()) for last in latest)
        true_starts = int((begins >= earliest).sum())
        first_ahead = float(died - begins[0]) * SCRAPE_SECONDS if len(begins) else None
    return Outcome(
        kind=kind,
        group=group,
        hours=recording.hours,
        died=recording.died is not None,
        told=told,
        starts=len(begins),
        true_starts=true_starts,
        firing_hours=float(fires.sum()) * SCRAPE_SECONDS / 3600,
        ahead=first_ahead,
        likeness=likeness,
    )


@dataclass(frozen=True, slots=True)
class Score:
    """The figures of one rule; shares are between 0 and 1, false alarms per 100 healthy hours."""

    rule: str
    growing: int
    told: tuple[float, ...]
    told_of_all: float
    false_alarms: float
    false_alarms_flat: float
    false_alarms_stops: float
    healthy_hours: float
    time_in_alarm: float
    came_true: float
    by_kind: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanScore:
    """What the alert on planned batches did: jobs by kind that it told, and that died.

    `warned` is the number of jobs that it fired in, `came_true` the share of these that died,
    `minutes_ahead` the median of how long before, and `false_alarms` per 100 healthy hours of all
    jobs.
    """

    warned: int
    came_true: float
    minutes_ahead: float
    false_alarms: float
    by_kind: dict[str, tuple[int, int]]


def plan_score(outcomes: Sequence[Outcome], kinds: Iterable[str]) -> PlanScore:
    """Sum up the outcomes of the alert on planned batches; `kinds` are those that die of one."""
    warned = [job for job in outcomes if job.starts]
    ahead = [job.ahead for job in warned if job.ahead is not None]
    by_kind = {}
    for kind in kinds:
        dead = [job for job in outcomes if job.kind == kind and job.died]
        told = sum(job.ahead is not None and job.ahead >= AHEAD_SECONDS[0] for job in dead)
        by_kind[kind] = (told, len(dead))
    return PlanScore(
        warned=len(warned),
        came_true=_share(job.died for job in warned),
        minutes_ahead=median(ahead) / 60 if ahead else 0.0,
        false_alarms=_rate([job for job in outcomes if not job.died]),
        by_kind=by_kind,
    )


def effective_group(kind_group: Group, *, died: bool) -> Group | None:
    """Return the group of a job by its end, or None if it says nothing.

    Growth that was to stop but met the limit before is growth like any other; growth that has not
    met it when the recording ends may still be told rightly.
    """
    if kind_group == "growing":
        return "growing" if died else None
    if kind_group == "sudden":
        return "sudden" if died else "flat"
    if kind_group == "stops":
        return "growing" if died else "stops"
    return "sudden" if died else "flat"


def score(rule: str, outcomes: Sequence[Outcome]) -> Score:
    """Sum up the outcomes of one rule."""
    growing = [job for job in outcomes if job.group == "growing"]
    dead = [job for job in outcomes if job.died]
    healthy = [job for job in outcomes if not job.died]
    starts = sum(job.starts for job in outcomes)
    return Score(
        rule=rule,
        growing=len(growing),
        told=tuple(_share(told) for told in zip(*(job.told for job in growing), strict=True)),
        told_of_all=_share(job.told[0] for job in dead),
        false_alarms=_rate(healthy),
        false_alarms_flat=_rate([job for job in healthy if job.group == "flat"]),
        false_alarms_stops=_rate([job for job in healthy if job.group == "stops"]),
        healthy_hours=sum(job.hours for job in healthy),
        time_in_alarm=sum(job.firing_hours for job in healthy)
        / max(1e-9, sum(job.hours for job in healthy)),
        came_true=sum(job.true_starts for job in outcomes) / starts if starts else 0.0,
        by_kind=_by_kind(outcomes),
    )


def _share(values: Iterable[bool]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _rate(jobs: Sequence[Outcome]) -> float:
    hours = sum(job.hours for job in jobs)
    return 100 * sum(job.starts for job in jobs) / hours if hours else 0.0


def _by_kind(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, int]]:
    """Return for each kind of job that died how many were told, and how many there were."""
    kinds: dict[str, tuple[int, int]] = {}
    for job in outcomes:
        if job.died:
            told, number = kinds.get(job.kind, (0, 0))
            kinds[job.kind] = (told + job.told[0], number + 1)
    return kinds
