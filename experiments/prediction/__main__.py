"""Measure how many OutOfMemoryErrors an alert predicts in time, and how often it is wrong.

    PYTHONPATH=tests python -m experiments.prediction                  # 40 minutes; then from files
    PYTHONPATH=tests python -m experiments.prediction --seeds 500 504  # a sixth of it
    PYTHONPATH=tests python -m experiments.prediction --write          # and write what docs quote
    PYTHONPATH=tests python -m experiments.prediction --promtool 20    # compare with Prometheus

Each job is simulated in virtual time by the project's own allocator, under the SDK's own recorder,
and scraped every 10 seconds. The rules are evaluated as PromQL. Seeds below 500 were used to tune
the shipped rule; the results are from the other seeds.
docs/measurements/prediction.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt
from experiments.prediction import prometheus
from experiments.prediction.candidates import (
    CANDIDATES,
    PLAN_ALERT,
    normalized,
    shipped,
    without_earlier_runs,
    without_history,
    without_keeping,
)
from experiments.prediction.jobs import (
    DIES_OF_A_BATCH,
    KINDS,
    Group,
    Job,
    Likeness,
    before,
    job,
)
from experiments.prediction.recordings import Recording, record_all, with_earlier
from experiments.prediction.yardstick import (
    Outcome,
    PlanScore,
    Rule,
    Score,
    effective_group,
    fires_in_job,
    outcome,
    plan_score,
    score,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "prediction"
RESULTS = ROOT / "tools" / "src" / "torchmem" / "manifests" / "prediction.json"
HELD_OUT = (500, 524)
"""Seeds that were not used for tuning."""

Played = tuple[Job, Group, Recording]


def play(seeds: range, folder: Path) -> list[Played]:
    """Return the jobs of all kinds with their recordings, without those that tell nothing."""
    jobs = [job(kind, seed) for seed in seeds for kind in KINDS]
    record_all(jobs, folder)
    played: list[Played] = []
    for made in jobs:
        recorded = with_earlier(made, folder)
        group = effective_group(made.group, died=recorded.died is not None)
        if group is not None:
            played.append((made, group, recorded))
    return played


def outcomes(rules: Sequence[Rule], jobs: Sequence[Played]) -> list[Outcome]:
    """Return what rules do in each job, of which any may fire."""
    return [
        outcome(made.kind, group, recorded, _any_firing(rules, recorded), before(made).likeness)
        for made, group, recorded in jobs
    ]


def _any_firing(rules: Sequence[Rule], recorded: Recording) -> npt.NDArray[np.bool_]:
    return reduce(np.logical_or, (fires_in_job(rule, recorded) for rule in rules))


def show(scores: Sequence[Score]) -> None:
    """Print the table, and what the first rule tells of each kind."""
    print("| rule | growing, 2 min | 10 min | of all | FA per 100 h (flat / stops) | came true |")
    print("|---|---|---|---|---|---|")
    for each in scores:
        print(
            f"| {each.rule} | {each.told[0]:.0%} | {each.told[1]:.0%} | {each.told_of_all:.0%} "
            f"| {each.false_alarms:.1f} ({each.false_alarms_flat:.1f} / "
            f"{each.false_alarms_stops:.1f}) | {each.came_true:.0%} |"
        )
    first = scores[0]
    print(f"\n{first.growing} OOMs by growth, {first.healthy_hours:.0f} healthy hours. By kind:")
    print(", ".join(f"{kind} {told}/{number}" for kind, (told, number) in first.by_kind.items()))


def by_likeness(outcomes: Sequence[Outcome]) -> dict[Likeness, Score]:
    """Return the figures of one rule apart, by what ran before under the name of the job."""
    kinds: tuple[Likeness, ...] = ("first", "same", "changed")
    return {kind: score(kind, [job for job in outcomes if job.likeness == kind]) for kind in kinds}


def show_plan(plan: PlanScore) -> None:
    """Print what the alert on planned batches tells."""
    print(
        f"\nPlanned batches: {plan.warned} jobs warned, of which {plan.came_true:.0%} died, "
        f"{plan.minutes_ahead:.0f} min later; {plan.false_alarms:.1f} FA per 100 h"
    )
    print(", ".join(f"{kind} {told}/{number}" for kind, (told, number) in plan.by_kind.items()))


def write(
    scores: Sequence[Score],
    apart: Mapping[Likeness, Score],
    plan: PlanScore,
    seeds: range,
    jobs: int,
) -> None:
    """Write the results that the alerts, the dashboards and the documentation quote."""
    results = {
        "seeds": [seeds.start, seeds.stop],
        "jobs": jobs,
        "before": {kind: asdict(each) for kind, each in apart.items()},
        "expressions": normalized(shipped()) + normalized(shipped(PLAN_ALERT)),
        "rules": [asdict(each) for each in scores],
        "plan": asdict(plan),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Simulate, evaluate, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs=2, default=HELD_OUT, metavar=("FIRST", "END"))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where recordings are kept")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--promtool", type=int, metavar="N", help="compare N jobs with promtool")
    arguments = parser.parse_args()
    seeds = range(*arguments.seeds)
    jobs, rule = play(seeds, arguments.folder), shipped()
    if arguments.promtool:
        sample = jobs[:: max(1, len(jobs) // arguments.promtool)][: arguments.promtool]
        for made, _, recorded in sample:
            print(f"{made.scenario.name}: {prometheus.compare(rule, recorded)}", flush=True)
        return
    others = (without_earlier_runs, without_keeping, without_history)
    rules = (*(changed(rule) for changed in others), *CANDIDATES)
    planned, results = shipped(PLAN_ALERT), outcomes([rule], jobs)
    scores = [score(rule.name, results)]
    scores += [score(each.name, outcomes([each], jobs)) for each in rules]
    scores.insert(
        1, score("shipped, with TorchmemPlannedBatchTooLarge", outcomes([rule, planned], jobs))
    )
    plan = plan_score(outcomes([planned], jobs), DIES_OF_A_BATCH)
    apart = by_likeness(results)
    show(scores)
    print()
    show(list(apart.values()))
    show_plan(plan)
    if arguments.write:
        write(scores, apart, plan, seeds, len(jobs))


if __name__ == "__main__":
    main()
