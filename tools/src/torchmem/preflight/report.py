"""One run, and everything that is said about it.

What a phantom cannot know, and what else a reader should hear.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torchmem.allocator.oom_report import OomReport
from torchmem.allocator.sizes import format_size
from torchmem.oom.command import load
from torchmem.phantom.cards import Card
from torchmem.preflight.attempts import Attempts, failure
from torchmem.preflight.comparison import Comparison, compare
from torchmem.preflight.outcome import Outcome
from torchmem.preflight.plan import Plan
from torchmem.preflight.verdict import Verdict, growth, verdict
from torchmem.preflight.wanted import Wanted
from torchmem.sample.errors import UsageError

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
            found,
            no_comparison=f"it runs out of memory on a card of {ROOMIER} times this one's size as well.",
        )
    try:
        return replace(found, comparison=compare(wanted, outcome, need or outcome, on, attempts))
    except UsageError as reason:
        return replace(found, no_comparison=str(reason))


def _need(plan: Plan, outcome: Outcome, attempts: Attempts) -> tuple[Outcome | None, Card]:
    """What the script needs when nothing stops it, if something did; and the card of the trace to replay."""
    if outcome.ended != "oom":
        return None, plan.card
    roomy = replace(
        plan.card,
        name=f"{ROOMIER}x {plan.card.name}",
        memory_bytes=ROOMIER * plan.card.memory_bytes,
    )
    found = attempts.quietly(replace(plan, card=roomy), f"phantom of {ROOMIER} times the memory")
    return (found, roomy) if failure(found) is None and found.devices else (None, plan.card)


def _keep(outcome: Outcome, path: Path) -> None:
    """A copy that nobody else may read, as it tells where the code lies."""
    if outcome.snapshot is None:
        raise UsageError(
            "--snapshot: nothing was recorded, as with an allocator other than PyTorch's own."
        )
    try:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with outcome.snapshot.open("rb") as source, open(target, "wb") as copy:  # noqa: PTH123 - a descriptor
            os.fchmod(target, 0o600)
            shutil.copyfileobj(source, copy)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): name another file with --snapshot."
        ) from None


ALWAYS = (
    "A phantom GPU computes nothing: values read from it are zero, time on it means nothing, and the workspaces of "
    "some libraries are estimates."
)


def notes(report: Report) -> Iterator[str]:
    """Sentences, the gravest first."""
    yield from _growth(report)
    yield from _values(report)
    yield from _lacking(report)
    if report.need is not None:
        yield (
            f"What it needs was seen in a second run, on a phantom with {ROOMIER} times the memory; the replays are of "
            "that run."
        )
    if report.comparison and report.comparison.method == "replayed":
        yield (
            "Replays take it that the script asks for the same sizes in the same order; on other cards, that kernels "
            "and workspaces are those of this one."
        )
    yield ALWAYS


def _growth(report: Report) -> Iterator[str]:
    for device in report.outcome.devices:
        per_step = growth(device.steps)
        if per_step:
            left = max(0, device.headroom) // per_step
            yield (
                f"Memory on GPU {device.device} grows by {format_size(per_step)} with each step: a leak, or something "
                f"that is still being gathered. At this rate the card is full after {left:,} more steps."
            )


def _values(report: Report) -> Iterator[str]:
    times = report.outcome.values_read
    if times:
        yield (
            f"The script read values from the card {times:,} time{'s' * (times != 1)}, as Tensor.item() does, and got "
            "zeros. Where it decides by them (loss scaling, early stopping, sizes that depend on data) a real run may "
            "go another way."
        )


def _lacking(report: Report) -> Iterator[str]:
    names = list(dict.fromkeys(report.outcome.lacking))
    if names:
        yield f"The phantom GPU does not have {', '.join(names)}; the script went on without."
