"""The attempts of a run that ran out of memory, from its OOM reports, and what a setting gained.

Everything follows from the reports in the run directory: ranks that read the same files see the
same attempts, and nothing has to be written. The report of an attempt that got a setting has it as
the label `advice`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmem.allocator.settings import ADVICE_LABEL, WITHDRAWN
from torchmem.explain.oom_report import OomReport
from torchmem.explain.verdict import MIN_STEPS_SHARE
from torchmem.node.reports import load_all
from torchmem.sample.errors import UsageError
from torchmem.sample.run_directory import SAMPLE_SUFFIX, run_directory
from torchmem.sample.sample import read_sample
from torchmem.sample.untrusted import sanitize_text

MAX_REPORTS = 64
"""The newest reports that are read: all that the SDK keeps."""
MAX_AGE_SECONDS = 30 * 24 * 3600.0
"""Older reports no longer count, so a setting that is no longer needed goes away."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that ran out of memory: its report, and the report's path."""

    path: Path
    report: OomReport

    @property
    def advice(self) -> str | None:
        """The setting that it got, as text; None without one."""
        text = self.report.process.labels.get(ADVICE_LABEL)
        return None if text == WITHDRAWN else text

    @property
    def steps(self) -> str:
        """The number of steps that it finished, in words."""
        count = self.report.steps.count
        return f"{count:,} step{'s' * (count != 1)}"

    def file(self, suffix: str) -> Path:
        """Return the path of another file of its process."""
        return self.path.with_name(self.path.name.rpartition("-")[0] + suffix)


def find_attempts(run: str, environment: Mapping[str, str], now: float) -> list[Attempt]:
    """Return this user's attempts of a run that ended by an OOM, the oldest first."""
    try:
        found = load_all(run_directory(environment), own_only=True, limit=MAX_REPORTS)
    except UsageError:  # there is no report
        return []
    name = sanitize_text(run)
    attempts = [
        attempt
        for attempt in (Attempt(path, report) for path, report in found)
        if attempt.report.process.run == name
        and abs(now - attempt.report.timestamp) <= MAX_AGE_SECONDS
        and not _survived(attempt)
    ]
    return sorted(attempts, key=lambda each: (each.report.timestamp, each.report.process.pid))


def in_vain(attempts: Sequence[Attempt], text: str) -> tuple[Attempt, Attempt] | None:
    """Return an attempt without a setting and one with this one, if the latter did no better."""
    before = None
    for attempt in attempts:
        if attempt.advice is None:
            before = attempt
        elif before and attempt.advice == text and not _is_better(attempt, before):
            return before, attempt
    return None


def _is_better(attempt: Attempt, before: Attempt) -> bool:
    """Return whether it made more steps, enough to matter in a verdict.

    Attempts of the same job differ by a few, also on a leak, which no setting cures.
    """
    steps = before.report.steps.count
    return attempt.report.steps.count - steps >= max(1, MIN_STEPS_SHARE * steps)


def _survived(attempt: Attempt) -> bool:
    """Return whether its process is known to have gone on after its OOM."""
    if attempt.report.survived:
        return True
    sample = read_sample(attempt.file(SAMPLE_SUFFIX))
    if sample is None:
        return False
    return sample.ended == "exited" or not (sample.oom_pending or sample.ended == "oom")
