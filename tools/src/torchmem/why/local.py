"""The records of a run directory, which are those that an exporter of it serves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from torchmem.explain.chosen_thresholds import chosen
from torchmem.explain.oom_listings import listings
from torchmem.node.gpu_indices import gpu_indices
from torchmem.node.local import LocalRanks
from torchmem.node.reports import load, load_all
from torchmem.node.state import NodeState, RankWhy
from torchmem.node.summaries import steps_since
from torchmem.node.why import oom_why, with_replay
from torchmem.sample.capture_messages import (
    OOM_RECORDING_SUFFIX,
    OOM_SNAPSHOT_SUFFIX,
    SNAPSHOT_SUFFIX,
)
from torchmem.sample.errors import UsageError
from torchmem.sample.process_messages import sibling_path
from torchmem.sample.sample import LIVE_STATES
from torchmem.sample.untrusted import sanitize_text
from torchmem.trace.recorded_leaks import leak_documents, leak_lines, recorded_leaks, sentence
from torchmem.why import ooms
from torchmem.why.recorded_cure import recorded_cure
from torchmem.why.source import Explanation, FoundRank, OomRow, SnapshotFile

RECORDINGS = (SNAPSHOT_SUFFIX, OOM_SNAPSHOT_SUFFIX, OOM_RECORDING_SUFFIX)


class LocalNode:
    """The ranks and reports of this user in a run directory; of root, those of all users.

    `thresholds`: a file of the user, else TORCHMEM_THRESHOLDS names one.
    """

    def __init__(self, directory: Path, thresholds: Path | None = None) -> None:
        self._directory, self._ranks = directory, LocalRanks(directory, chosen(thresholds))
        self.name = f"the run directory {sanitize_text(str(directory))}"
        root = "; only root sees the processes of other users" if os.geteuid() else ""
        self.elsewhere = f"name another directory with --run-dir{root}"

    def node(self) -> NodeState:
        """Return the state of the node. Raise UsageError if the directory cannot be read."""
        return self._ranks.node()

    def why(self, found: FoundRank) -> RankWhy:
        """Return why the memory of a rank is as it is."""
        why = self._ranks.why(found.gpu.uuid, found.rank.id) or RankWhy()
        item = self._ranks.item(found.rank.id)
        device = item.device(found.gpu.uuid) if item else None
        if item is None or device is None or item.state not in LIVE_STATES:
            return why
        limits, file = self._ranks.found.limits(item), self._ranks.path(item)
        return with_replay(why, recorded_cure(item.sample, device, limits, file))

    def id_of(self, sample: Path) -> str | None:
        """Return the id of the rank that has published this file; None if there is none."""
        published = self._ranks.found.published
        return next((item.id for item in published if self._ranks.path(item) == sample), None)

    def recordings(self, found: FoundRank) -> list[SnapshotFile]:
        """Return the snapshots that lie beside the sample of a rank."""
        item = self._ranks.item(found.rank.id)
        return list(_recordings(self._ranks.path(item))) if item else []

    def reports(self, limit: int | None) -> list[OomRow]:
        """Return the OOM reports in the directory, the newest first."""
        with suppress(UsageError):
            return [ooms.of_report(*each) for each in load_all(self._directory, limit=limit)]
        return []

    def explain(self, file: str) -> Explanation:
        """Explain a report, with the lines that leak according to a recording beside it."""
        path = Path(file)
        report = load(path)
        leaking = recorded_leaks(path, report)
        gpu, since = gpu_indices().get(report.device.uuid or ""), steps_since(path, report)
        words = oom_why(report, gpu, may_look=True, steps_since=since)
        listed = (*listings(leak_lines(leaking)), *words.listings)
        words = replace(words, summary=sentence(report, leaking), listings=listed)
        row = replace(ooms.of_report(path, report), headline=words.summary)
        return Explanation(row, words, leak_documents(leaking))

    def rank_page(
        self, found: Sequence[FoundRank], whys: Sequence[RankWhy], pages: Sequence[str]
    ) -> Callable[[], bytes] | None:
        """Return what writes the page of a rank; None if it has ended meanwhile."""
        from torchmem.pages import rank

        item = self._ranks.item(found[0].rank.id)
        if item is None:
            return None
        known = {device.uuid or "": device for device in item.sample.devices}
        devices = (known[each.gpu.uuid] for each in found)
        told = list(zip(devices, whys, pages, strict=True))
        return partial(rank.page, self._ranks.path(item), item, found[0].time, told)

    def oom_page(self, found: Explanation) -> Callable[[], bytes] | None:
        """Return what writes the page of a report, with the memory map that lies beside it."""
        from torchmem.pages import oom

        path = Path(found.row.file or "")
        return partial(oom.page, path, load(path), found.oom)


def _recordings(sample: Path) -> Iterator[SnapshotFile]:
    for suffix in RECORDINGS:
        path = sibling_path(sample, suffix)
        with suppress(OSError):
            yield SnapshotFile(str(path), path.lstat().st_mtime)
