"""What holds the memory in a snapshot of PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torchmem.sample.errors import UsageError
from torchmem.trace import holders_document, holders_text
from torchmem.trace.holders import Holders
from torchmem.trace.leaks import Leak, is_long_enough, leaks
from torchmem.trace.lifetimes import At, Lifetimes
from torchmem.trace.snapshot_file import examine, read_traces

DEFAULT_ROWS = 12


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """How a snapshot is looked at.

    Attributes:
        at: the moment; None for the OutOfMemoryError if there is one, else the end.
        gpu: PyTorch's index of the device; None for all.
        rows: the most rows of each table.
        leaks: whether only lines are shown that allocate throughout the recording and never free.
    """

    at: At | None = None
    gpu: int | None = None
    rows: int = DEFAULT_ROWS
    leaks: bool = False


@dataclass(frozen=True)
class SnapshotAnswer:
    """A file of torch.cuda.memory._dump_snapshot or `torchmem capture`."""

    path: Path
    view: SnapshotView = SnapshotView()

    @cached_property
    def _examined(self) -> Sequence[tuple[Lifetimes, Holders]]:
        at: At | None = "end" if self.view.leaks else self.view.at
        traces = read_traces(self.path, self.view.gpu)
        return [examine(trace, self.path, at) for trace in traces]

    def words(self) -> str:
        """Return a page for each device."""
        return "\n".join(self._page(*each) for each in self._examined)

    def _page(self, lifetimes: Lifetimes, found: Holders) -> str:
        if self.view.leaks:
            return holders_text.leaks_page(found, _leaks(lifetimes), self.view.rows)
        return holders_text.page(found, self.view.rows)

    def json_lines(self) -> list[str]:
        """Return a document for each device."""
        return [self._document(*each) for each in self._examined]

    def _document(self, lifetimes: Lifetimes, found: Holders) -> str:
        if self.view.leaks:
            return holders_document.leaks_document(found, _leaks(lifetimes))
        return holders_document.document(found)

    def page(self) -> bytes:
        """Raise UsageError."""
        raise UsageError(
            "--html shows an OOM report or a rank; the exporter's page opens a snapshot."
        )


def _leaks(lifetimes: Lifetimes) -> Sequence[Leak] | None:
    return leaks(lifetimes) if is_long_enough(lifetimes) else None
