"""Measure how often growth is judged rightly, while a run lives and at its end.

    python -m experiments.histories                # the table, and what docs quote
    python -m experiments.histories --seeds tune   # while changing the judge
    python -m experiments.histories --patterns stairs wave

Each run is played in virtual time: its memory by a formula with noise, in steps of 5 ms to 5 s,
read by the SDK's own recorder and judged by the product's own judges. Runs of a pattern differ in
the length of a step, the number of steps, and the seed, which decides all sizes. The seeds of
`report` were not used to choose a threshold. It takes 3 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from experiments.histories.dying import DYING
from experiments.histories.healthy import HEALTHY
from experiments.histories.job import SEEDS, STEP_SECONDS, STEPS, Pattern
from experiments.histories.play import Played, play
from experiments.histories.score import (
    DyingScore,
    HealthyScore,
    Pair,
    jobs,
    score_dying,
    score_healthy,
    wrong,
)

T = TypeVar("T")
RESULTS = Path(__file__).with_name("results.json")
PATTERNS = (*DYING, *HEALTHY)


def played(patterns: Iterable[Pattern], seeds: range, workers: int) -> list[Played]:
    """Play every run of these patterns."""
    numbers = [PATTERNS.index(pattern) for pattern in patterns]
    with ProcessPoolExecutor(workers) as pool:
        found = pool.map(_played, numbers, [seeds] * len(numbers))
        return [run for runs in found for run in runs]


def _played(number: int, seeds: range) -> list[Played]:
    return [play(job) for job in jobs([PATTERNS[number]], seeds)]


def by_pattern(runs: Sequence[Played]) -> dict[str, list[Played]]:
    """Return the runs of each pattern."""
    found: dict[str, list[Played]] = {}
    for run in runs:
        found.setdefault(run.job.pattern.name, []).append(run)
    return found


def scores(runs: Sequence[Played]) -> tuple[dict[str, DyingScore], dict[str, HealthyScore]]:
    """Return the figures of each pattern, and of `all`."""
    dying = [run for run in runs if run.job.pattern.onsets]
    healthy = [run for run in runs if not run.job.pattern.onsets]
    return _with_all(score_dying, dying), _with_all(score_healthy, healthy)


def _with_all(score: Callable[[Sequence[Played]], T], runs: Sequence[Played]) -> dict[str, T]:
    groups = {**by_pattern(runs), "all": runs} if runs else {}
    return {name: score(each) for name, each in groups.items()}


def show(title: str, found: Mapping[str, DyingScore | HealthyScore]) -> None:
    """Print a table."""
    pairs: dict[str, dict[str, Pair]] = {name: asdict(each) for name, each in found.items()}
    for number, (name, row) in enumerate(pairs.items()):
        if number == 0:
            print(f"\n| {title} | {' | '.join(row)} |\n|---{'|---' * len(row)}|")
        cells = (f"{right}/{of}" if of else "–" for right, of in row.values())
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Play, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", choices=SEEDS, default="report")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--patterns", nargs="+", help="only those whose name contains one of these")
    arguments = parser.parse_args()
    wanted = arguments.patterns or [""]
    patterns = [each for each in PATTERNS if any(part in each.name for part in wanted)]
    runs = played(patterns, SEEDS[arguments.seeds], arguments.jobs)
    misses = [text for run in runs if (text := wrong(run))]
    print("\n".join(misses))
    dying, healthy = scores(runs)
    show("runs that end", dying)
    show("healthy runs", healthy)
    if arguments.seeds == "report" and not arguments.patterns:
        write(dying, healthy, misses)


def write(
    dying: Mapping[str, DyingScore], healthy: Mapping[str, HealthyScore], misses: Sequence[str]
) -> None:
    """Write what the documentation quotes."""
    seeds = SEEDS["report"]
    results = {
        "seeds": [seeds.start, seeds.stop],
        "step_seconds": STEP_SECONDS,
        "steps": STEPS,
        "dying": {name: asdict(each) for name, each in dying.items()},
        "healthy": {name: asdict(each) for name, each in healthy.items()},
        "misses": misses,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
