"""What holds the memory in a snapshot of PyTorch's allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text
from torchmem.trace import holders_document, holders_text
from torchmem.trace.holders import Holders
from torchmem.trace.last_entries import last_entries
from torchmem.trace.leaks import Leak, is_long_enough, leaks
from torchmem.trace.lifetimes import At, Lifetimes
from torchmem.trace.snapshot_file import examine, read_traces
from torchmem.whatif.moment import moment_memory
from torchmem.whatif.question import WhatIfQuestion, replayed
from torchmem.whatif.result import WhatIf
from torchmem.why import snapshot_words
from torchmem.why.snapshot_words import SnapshotFindings

DEFAULT_ROWS = 12
MAX_REPLAYED_EVENTS = 50_000
"""Of all devices together. More take more than a few seconds: `torchmem whatif` replays them."""


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
        return snapshot_words.page(found, self._more(lifetimes, found), self.view.rows)

    def json_lines(self) -> list[str]:
        """Return a document for each device."""
        return [self._document(*each) for each in self._examined]

    def _document(self, lifetimes: Lifetimes, found: Holders) -> str:
        if self.view.leaks:
            return holders_document.leaks_document(found, _leaks(lifetimes))
        more = snapshot_words.values(self._more(lifetimes, found))
        return holders_document.document(found, more)

    def _more(self, lifetimes: Lifetimes, found: Holders) -> SnapshotFindings:
        events = sum(each.events for each, _ in self._examined)
        settings, unasked = self._settings(lifetimes, events)
        return SnapshotFindings(
            moment_memory(lifetimes, found.moment),
            _leaks(lifetimes, found.moment),
            last_entries(lifetimes, found.moment, self.view.rows),
            settings,
            unasked,
        )

    def _settings(self, lifetimes: Lifetimes, events: int) -> tuple[WhatIf | None, str | None]:
        """Return what other settings would have given, or why that is not known."""
        if not lifetimes.trace.columns.has_allocations():
            return None, None
        name = sanitize_text(str(self.path))
        if events > MAX_REPLAYED_EVENTS:
            return None, f"`torchmem whatif {name}` replays the trace under other settings."
        try:
            return replayed(lifetimes.trace.recording(), WhatIfQuestion()), None
        except UsageError as error:
            return None, f"The trace cannot be replayed under other settings: {error}"

    def page(self) -> bytes:
        """Raise UsageError."""
        raise UsageError(
            "--html shows an OOM report or a rank; the exporter's page opens a snapshot, and "
            "--plot draws one."
        )

    def plot(self, out: Path) -> None:
        """Draw the memory by line over time. Raise UsageError unless one device is shown."""
        from torchmem.trace import holders_plot

        if len(self._examined) > 1:
            devices = ", ".join(str(found.device) for _, found in self._examined)
            raise UsageError(f"--plot draws one GPU: pass --gpu with one of {devices}.")
        for lifetimes, found in self._examined:
            holders_plot.draw(lifetimes, found, out)


def _leaks(lifetimes: Lifetimes, moment: int | None = None) -> Sequence[Leak] | None:
    return leaks(lifetimes, moment) if is_long_enough(lifetimes, moment) else None
