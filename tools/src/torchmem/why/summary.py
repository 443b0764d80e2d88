"""How a run went: the summary that its process left at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchmem.explain.run_summary import RunSummary, encode
from torchmem.node.words import summary_page
from torchmem.sample.errors import UsageError


@dataclass(frozen=True, slots=True)
class SummaryAnswer:
    """One summary and its file."""

    path: Path
    summary: RunSummary

    def words(self) -> str:
        """Return how the run ended, and what its peak consisted of."""
        return summary_page(self.path, self.summary)

    def json_lines(self) -> list[str]:
        """Return the file as it is."""
        return [encode(self.summary).decode().rstrip()]

    def page(self) -> bytes:
        """Raise UsageError."""
        raise UsageError(
            "--html shows an OOM report or a rank: `torchmem compare --markdown` writes about runs."
        )
