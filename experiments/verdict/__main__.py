"""Measure how often the verdict on an OutOfMemoryError is right, and what its advice is worth.

    PYTHONPATH=tests .venv-cuda/bin/python -m experiments.verdict               # the table
    PYTHONPATH=tests .venv-cuda/bin/python -m experiments.verdict --seeds tune  # while changing it
    PYTHONPATH=tests .venv-cuda/bin/python -m experiments.verdict --kinds hook window

Each job is a short training script on PyTorch's real allocator, on a phantom GPU. It runs until it
ends, again with expandable segments if they show the true cause, again with the report's first
advice followed, and again with memory history if one of its lines is responsible. docs/verdict.md
explains the figures. The seeds of `report` were not used to choose a threshold. It takes about 10
minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.verdict.jobs import chosen
from experiments.verdict.kinds import KINDS
from experiments.verdict.score import Outcome, by_kind, outcome, rows, score

RESULTS = Path(__file__).with_name("results.json")


def show(outcomes: Sequence[Outcome]) -> None:
    """Print the table, and what was wrong."""
    print("| kind | cause right | onset right | line right | advice cures | setting worth it |")
    print("|---|---|---|---|---|---|")
    for name, each in {**by_kind(outcomes), "all": score(outcomes)}.items():
        pairs = each.cause, each.onset, each.line, each.cure, each.setting
        print(f"| {name} | " + " | ".join(f"{right}/{of}" for right, of in pairs) + " |")
    right, of = score(outcomes).both
    print(f"\nCause and onset right: {right} of {of}.")
    missed, of = score(outcomes).missed
    print(f"Fragmentation missed: {missed} of {of}.")


def wrong(each: Outcome) -> str:
    """Return what is wrong with a verdict, in one line; "" if nothing is."""
    found = []
    if not each.cause_right:
        found.append(f"cause {each.cause}, true {'/'.join(each.causes)}")
    if not each.onset_right:
        found.append(f"onset {each.onset}, true {'/'.join(each.onsets)}")
    if each.line_right is False:
        found.append("another line")
    if not each.is_cured:
        found.append(f"{each.followed or 'no advice'} gained {each.gained:.0%}")
    return f"{each.kind} {each.seed}: {'; '.join(found)}" if found else ""


def main() -> None:
    """Run, print, and write."""
    jobs, outcomes = chosen(__doc__), []
    for case, each in jobs.run(outcome):
        if each is None:
            print(f"{case.name}: finished, so it says nothing", file=sys.stderr)
            continue
        outcomes.append(each)
        if text := wrong(each):
            print(text, file=sys.stderr, flush=True)
    show(outcomes)
    if jobs.reported:
        write(outcomes, jobs.reported)


def write(outcomes: Sequence[Outcome], seeds: range) -> None:
    """Write what the documentation quotes."""
    texts = {kind.function: kind.text for kind in KINDS}
    results = {
        "seeds": [seeds.start, seeds.stop],
        "all": asdict(score(outcomes)),
        "kinds": {texts[name]: asdict(each) for name, each in by_kind(outcomes).items()},
        "jobs": rows(outcomes),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
