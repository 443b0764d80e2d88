"""One run, and everything that is said about it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from torchmem.cli.oom.files import load
from torchmem.cli.preflight.attempts import Attempts, failure
from torchmem.cli.preflight.comparison import Comparison, compare
from torchmem.cli.preflight.verdict import Verdict, verdict
from torchmem.cli.preflight.wanted import Wanted
from torchmem.core.errors import UsageError
from torchmem.core.report import OomReport
from torchmem.phantom.cards import Card
from torchmem.preflight.outcome import Outcome
from torchmem.preflight.plan import Plan

ROOMIER = 8
"""The true need of a script that runs out of memory is looked for on a card so many times as large."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one run showed.

    oom: of the OutOfMemoryError that ended it. need: the same command on a card of `ROOMIER` times the memory, when it
    ran out; None otherwise. comparison: of settings and cards; None with the reason in `no_comparison`.
    """

    plan: Plan
    outcome: Outcome
    verdict: Verdict
    oom: OomReport | None = None
    need: Outcome | None = None
    comparison: Comparison | None = None
    no_comparison: str | None = None


def report(wanted: Wanted, attempts: Attempts) -> Report:
    """Run the plan and look at it from all sides; raises UsageError when there is no verdict."""
    plan = wanted.plan
    outcome = attempts.openly(plan)
    error = failure(outcome)
    if error is not None:
        raise error
    if wanted.snapshot:
        _keep(outcome, wanted.snapshot)
    oom = load(outcome.oom_report) if outcome.oom_report and outcome.ended == "oom" else None
    need, on = _need(plan, outcome, attempts)
    found = Report(plan, outcome, verdict(plan.card, outcome, oom, need), oom, need)
    if need is not None and need.ended == "oom":
        return replace(
            found, no_comparison=f"it runs out of memory on a card of {ROOMIER} times this one's size as well."
        )
    try:
        return replace(found, comparison=compare(wanted, outcome, need or outcome, on, attempts))
    except UsageError as reason:
        return replace(found, no_comparison=str(reason))


def _need(plan: Plan, outcome: Outcome, attempts: Attempts) -> tuple[Outcome | None, Card]:
    """What the script needs when nothing stops it, if something did; and the card of the trace to replay."""
    if outcome.ended != "oom":
        return None, plan.card
    roomy = replace(plan.card, name=f"{ROOMIER}x {plan.card.name}", memory_bytes=ROOMIER * plan.card.memory_bytes)
    found = attempts.quietly(replace(plan, card=roomy), f"phantom of {ROOMIER} times the memory")
    return (found, roomy) if failure(found) is None and found.devices else (None, plan.card)


def _keep(outcome: Outcome, path: Path) -> None:
    """A copy that nobody else may read, as it tells where the code lies."""
    if outcome.snapshot is None:
        raise UsageError("--snapshot: nothing was recorded, as with an allocator other than PyTorch's own.")
    try:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with outcome.snapshot.open("rb") as source, open(target, "wb") as copy:  # noqa: PTH123 - a descriptor
            os.fchmod(target, 0o600)
            shutil.copyfileobj(source, copy)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}): name another file with --snapshot.") from None
