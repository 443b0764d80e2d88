"""The page and the JSON document of a bisection, described in docs/preflight-bisect.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torchmem.allocator.sizes import format_size
from torchmem.compare.peak_lines import change_lines, change_values
from torchmem.compare.peak_memory import PeakDiff, diff
from torchmem.preflight.bisect import BisectResult, CommitRun, peak
from torchmem.preflight.document import dump_document, judged_values
from torchmem.preflight.growth import deciding_growth
from torchmem.preflight.pages import (
    TABLE_COLUMNS,
    steps_of_each,
    table_figures,
    table_page,
    table_title,
)
from torchmem.preflight.report import PHANTOM_NOTE
from torchmem.preflight.verdict import growth_sentence

SUBJECT_COLUMNS = 24
SMALL_SHARE = 0.1
"""Of the whole increase; less from other commits is not mentioned."""
WORDS = {"good": "good", "bad": "bad", "skip": "no verdict"}


def page(result: BisectResult) -> str:
    """Return the page for a terminal."""
    good, bad = result.runs[0].commit, result.runs[-1].commit
    what = f"the commit that costs the memory, from {good.short} to {bad.short}"
    steps = f"{steps_of_each(result.plan, '', result.runs)}{_changes(result)}"
    rows = [("  commit", *TABLE_COLUMNS), *(_row(run, result) for run in result.runs)]
    found = _diff(result)
    conclusion = sentence(result), *(change_lines(found) if found else ())
    return table_page(table_title(result.plan, what), steps, rows, *conclusion)


def sentence(result: BisectResult) -> str:
    """Return the conclusion."""
    if result.criterion is None:
        return _no_difference(result)
    culprit = result.culprit
    if culprit is None:
        names = ", ".join(commit.short for commit in result.found)
        return (
            f"It is one of {names}: at the others of them the script has no verdict, so it cannot "
            "be said which."
        )
    name = f"{culprit.commit.short} ({culprit.commit.subject}) costs the memory"
    return f"{name}{_reason(culprit, result)}{_rise(result)}{_rest(result)}"


def document(result: BisectResult) -> str:
    """Return one line of JSON."""
    culprit = result.culprit
    values = {
        "verdict": {"fits": result.runs[-1].fits, "sentence": sentence(result)},
        "criterion": result.criterion,
        "commit": asdict(culprit.commit) if culprit else None,
        "candidates": [asdict(commit) for commit in result.found],
        "increase_bytes": _increase(result),
        "changes": change_values(found) if (found := _diff(result)) else [],
        "commits": [_run_values(run) for run in result.runs],
        "notes": [PHANTOM_NOTE],
    }
    return dump_document("bisect", result.plan, values)


def _no_difference(result: BisectResult) -> str:
    good, bad = result.runs[0], result.runs[-1]
    peak = format_size(good.result.fullest_device.peak_allocated)
    return (
        f"No commit costs memory: {good.commit.short} and {bad.commit.short} take the same, a peak "
        f"of {peak}. If that is not true, see whether the script imports this repository's code "
        "from elsewhere, such as an installed copy."
    )


def _row(run: CommitRun, result: BisectResult) -> tuple[str, ...]:
    mark = "* " if run.commit in result.found else "  "
    subject = run.commit.subject
    if len(subject) > SUBJECT_COLUMNS:
        subject = subject[: SUBJECT_COLUMNS - 1] + "…"
    return f"{mark}{run.commit.short} {subject}", *table_figures(run.result, WORDS[run.answer])


def _changes(result: BisectResult) -> str:
    if not result.has_changes:
        return ""
    return " Changes that are not committed are in none of the runs."


def _reason(culprit: CommitRun, result: BisectResult) -> str:
    """Return the end of the sentence, with why the script does not fit from this commit on."""
    if result.criterion != "fits":
        return "."
    found = deciding_growth(culprit.result)
    if found and culprit.result.ended != "oom":
        return f". {growth_sentence(found, culprit.result)}"
    return ": it is the first commit at which the script does not fit."


def _rise(result: BisectResult) -> str:
    """Return how the peak rose with the commit, where both peaks are known."""
    culprit, parent, increase = result.culprit, result.parent, _increase(result)
    if culprit is None or parent is None or increase is None or increase <= 0:
        return ""
    before, after = (peak(run.result, result.criterion) for run in (parent, culprit))
    kind = "reserved" if result.criterion == "peak_reserved" else "allocated"
    return (
        f" Its peak of {kind} memory is {format_size(after)} instead of {format_size(before)}, "
        f"{format_size(increase)} more ({increase / before:+.0%})."
    )


def _diff(result: BisectResult) -> PeakDiff | None:
    """Return what changed with the commit, by component, module and line; None if unknown."""
    culprit, parent = result.culprit, result.parent
    if culprit is None or parent is None or _increase(result) is None:
        return None
    return diff(parent.result.fullest_device.memory, culprit.result.fullest_device.memory)


def _rest(result: BisectResult) -> str:
    """Return what other commits of the range cost, if that matters."""
    increase = _increase(result)
    if result.criterion == "fits" or increase is None:
        return ""
    ends = (result.runs[0], result.runs[-1])
    first, last = (peak(run.result, result.criterion) for run in ends)
    rest = last - first - increase
    if abs(rest) < SMALL_SHARE * (last - first):
        return ""
    word = "more" if rest > 0 else "less"
    return f" The other commits take {format_size(abs(rest))} {word} together."


def _increase(result: BisectResult) -> int | None:
    """Return the bytes that the commit adds; None if its parent was not run or it ran out."""
    culprit, parent = result.culprit, result.parent
    if culprit is None or parent is None or not (culprit.result.devices and parent.result.devices):
        return None
    if "oom" in {culprit.result.ended, parent.result.ended}:
        return None
    return peak(culprit.result, result.criterion) - peak(parent.result, result.criterion)


def _run_values(run: CommitRun) -> dict[str, Any]:
    return asdict(run.commit) | {"answer": run.answer} | judged_values(run)
