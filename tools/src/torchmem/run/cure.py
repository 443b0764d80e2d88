"""Whether an allocator setting may cure an OOM, judged by its verdict, and if not, why."""

from __future__ import annotations

from torchmem.explain.headline import headline
from torchmem.explain.oom_report import OomReport
from torchmem.explain.remedies import remedies
from torchmem.explain.remedy import Remedy
from torchmem.explain.verdict import MIN_STEPS_SHARE, Gain

COMPACTING = "expandable_segments"


def is_material(report: OomReport) -> bool:
    """Return whether compaction, the aim of settings, would have made room that matters."""
    return report.oom.cause == "fragmentation"


def may_be_cured(report: OomReport) -> bool:
    """Return whether a replay may show a setting with which memory suffices.

    Where memory grows, compaction that does not matter would only move the end by a few steps.
    """
    return is_material(report) or (_compaction(report) is not None and not _growth(report))


def needed_room(report: OomReport) -> int:
    """Return the bytes that a setting must leave after the failed request: steps that matter.

    A replay ends with that request. 0 where memory does not grow.
    """
    return int(MIN_STEPS_SHARE * report.steps.count * _growth(report))


def best_remedy(report: OomReport) -> Remedy | None:
    """Return the first remedy against fragmentation, which need not be a setting.

    Where memory grows, only expandable segments gain about as much as compaction.
    """
    gain = _compaction(report)
    found = (r for r in remedies(report) if gain is None or r.gain_bytes == gain.bytes)
    best = next(found, None)
    compacts = best is not None and best.setting == COMPACTING
    return best if compacts or not _growth(report) else None


def not_added(report: OomReport, problem: str | None = None) -> str:
    """Return why no setting is added, as a sentence; `problem` is that of a recording."""
    if not may_be_cured(report):
        end = ", which no setting cures." if report.oom.cause == "capacity" else "."
    elif problem:
        end = f". The recording does not show whether one would be enough: {problem}"
    else:
        end = "; a recording (TORCHMEM_CAPTURE_ON_OOM=trace) would show whether one is enough."
    return f"no setting is added: {_lower(headline(report))}{end}"


def expected(report: OomReport) -> str:
    """Return what a setting gains where memory grows anyway, to follow a sentence; "" elsewhere."""
    gain = _compaction(report)
    if gain is None or gain.steps is None:
        return ""
    return f". Memory grows in each step, so that this is room for about {gain.steps:,.0f} more"


def _compaction(report: OomReport) -> Gain | None:
    gains = report.verdict.gains if report.verdict else ()
    return next((gain for gain in gains if gain.change == "compaction"), None)


def _growth(report: OomReport) -> float:
    """Return the bytes by which memory grows in each step, 0 if it does not."""
    why = report.verdict.why if report.verdict else None
    return (why.bytes_per_step if why else None) or 0.0


def _lower(sentence: str) -> str:
    return f"{sentence[0].lower()}{sentence[1:]}"
