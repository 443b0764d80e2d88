"""Why a process ran out of memory: an OOM report, with the recording beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchmem.explain.oom_report import OomReport
from torchmem.node.gpu_indices import gpu_indices
from torchmem.node.reports import load
from torchmem.node.words import oom_page
from torchmem.sample.errors import UsageError
from torchmem.trace.leaks import Leak
from torchmem.trace.recorded_leaks import leak_documents, leak_lines, recorded_leaks, sentence
from torchmem.why.node_words import oom_table
from torchmem.why.ooms import of_report


@dataclass(frozen=True)
class OomAnswer:
    """One report and its file."""

    path: Path
    report: OomReport

    @classmethod
    def read(cls, path: Path) -> OomAnswer:
        """Read the report. Raise UsageError if it cannot be used."""
        return cls(path, load(path))

    @cached_property
    def _leaks(self) -> tuple[Leak, ...]:
        return recorded_leaks(self.path, self.report)

    def words(self) -> str:
        """Return the verdict, what led to it, and what to do."""
        found = self._leaks
        told, lines = sentence(self.report, found), list(leak_lines(found))
        return oom_page(self.path, self.report, gpu_indices(), told, lines)

    def json_lines(self) -> list[str]:
        """Return the file, with the verdict in words."""
        return [json.dumps(document(self.report, self._leaks), allow_nan=False)]

    def page(self) -> bytes:
        """Return the page, with the memory map at the OOM if the process left it."""
        from torchmem.pages.oom import page

        return page(self.path, self.report, gpu_indices(), self._leaks)


@dataclass(frozen=True, slots=True)
class OomList:
    """The reports of a run directory, the newest first."""

    reports: Sequence[tuple[Path, OomReport]]

    def words(self) -> str:
        """Return for each report the process and its request, the verdict, and the file."""
        return oom_table(of_report(*each) for each in self.reports)

    def json_lines(self) -> list[str]:
        """Return each file, with its verdict in words."""
        found: Iterable[dict[str, Any]] = (document(report) for _, report in self.reports)
        return [json.dumps(each, allow_nan=False) for each in found]

    def page(self) -> bytes:
        """Raise UsageError."""
        raise UsageError("--html shows one report: name it, without --list.")


def document(report: OomReport, leaking: Sequence[Leak] = ()) -> dict[str, Any]:
    """Return a report for JSON: the file, with the verdict in words.

    `verdict` is public: `cause`, `onset`, `headline`, and `gains`, what each change would have
    freed. `onset` is None where it is unknown; `gains` is empty if no change would have made room.
    `leaks` are the lines that leak according to a recording beside the report.
    """
    verdict = report.verdict
    words = {
        "cause": report.oom.cause,
        "detail": report.oom.detail,
        "onset": report.oom.onset,
        "headline": sentence(report, leaking),
        "gains": [asdict(gain) for gain in verdict.gains] if verdict else [],
        "leaks": leak_documents(leaking),
        "why": asdict(verdict.why) if verdict and verdict.why else None,
    }
    return {**asdict(report), "verdict": words}
