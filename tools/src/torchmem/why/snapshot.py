"""What holds the memory in a snapshot of PyTorch's allocator."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torchmem.pages.page import Heading, still
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
from torchmem.why import snapshot_words
from torchmem.why.snapshot_words import SnapshotFindings

DEFAULT_ROWS = 12
MAX_REPLAYED_EVENTS = 50_000
"""Of all devices together. More take more than a few seconds: `torchmem whatif` replays them."""
TOO_LONG = (
    f"Replay the trace, which has more than {MAX_REPLAYED_EVENTS:,} events, under other settings:"
)


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

    @cached_property
    def _findings(self) -> Sequence[tuple[Holders, SnapshotFindings]]:
        return [(found, self._more(lifetimes, found)) for lifetimes, found in self._examined]

    def words(self) -> str:
        """Return a page for each device."""
        rows = self.view.rows
        if self.view.leaks:
            pages = [
                holders_text.leaks_page(found, _leaks(lifetimes), rows)
                for lifetimes, found in self._examined
            ]
        else:
            pages = [snapshot_words.page(*each, rows) for each in self._findings]
        return "\n".join(pages)

    def json_lines(self) -> list[str]:
        """Return a document for each device."""
        if self.view.leaks:
            return [
                holders_document.leaks_document(found, _leaks(lifetimes))
                for lifetimes, found in self._examined
            ]
        return [
            holders_document.document(found, snapshot_words.values(more))
            for found, more in self._findings
        ]

    def _more(self, lifetimes: Lifetimes, found: Holders) -> SnapshotFindings:
        events = sum(each.events for each, _ in self._examined)
        known = SnapshotFindings(
            moment_memory(lifetimes, found.moment),
            _leaks(lifetimes, found.moment),
            last_entries(lifetimes, found.moment, self.view.rows),
        )
        if not lifetimes.trace.columns.has_allocations():
            return known
        if events > MAX_REPLAYED_EVENTS:
            name = shlex.quote(sanitize_text(str(self.path)))
            return replace(known, unreplayed=TOO_LONG, command=f"torchmem whatif {name}")
        try:
            answer = replayed(lifetimes.trace.recording(), WhatIfQuestion())
        except UsageError as error:
            return replace(known, unreplayed=f"The trace cannot be replayed: {error}")
        return replace(known, settings=answer)

    def page(self) -> bytes:
        """Return the text as an HTML page, whose headline is about the device that uses most."""
        name = sanitize_text(self.path.name)
        found, more = max(self._findings, key=lambda each: each[0].size_bytes)
        failed = more.memory is not None and more.memory.failed is not None
        kind, state = ("Out of memory", "oom") if failed else ("Memory snapshot", "running")
        heading = Heading(
            title=f"{kind}: {name}",
            kind=kind,
            state=state,
            headline=snapshot_words.headline(found, more),
            about=[f"{name}  cuda:{each.device}" for each, _ in self._findings],
        )
        return still(heading, self.words(), "", "")


def _leaks(lifetimes: Lifetimes, moment: int | None = None) -> Sequence[Leak] | None:
    return leaks(lifetimes, moment) if is_long_enough(lifetimes, moment) else None
