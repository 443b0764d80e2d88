"""The records of a run directory, which are those that an exporter of it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torchmem.explain.oom_listings import listings
from torchmem.node.gpu_indices import gpu_indices
from torchmem.node.reports import load, load_all
from torchmem.node.state import NodeState, RankWhy
from torchmem.node.summaries import steps_since
from torchmem.node.why import oom_why
from torchmem.sample.capture_messages import (
    OOM_RECORDING_SUFFIX,
    OOM_SNAPSHOT_SUFFIX,
    SNAPSHOT_SUFFIX,
)
from torchmem.sample.errors import UsageError
from torchmem.sample.process_messages import sibling_path
from torchmem.top.local import LocalRanks
from torchmem.trace.recorded_leaks import leak_documents, leak_lines, recorded_leaks, sentence
from torchmem.why import ooms
from torchmem.why.source import MAX_REPORTS, Explanation, FoundRank, OomRow, SnapshotFile

RECORDINGS = (SNAPSHOT_SUFFIX, OOM_SNAPSHOT_SUFFIX, OOM_RECORDING_SUFFIX)


class LocalNode:
    """The ranks and reports of this user in a run directory; of root, those of all users."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._ranks = directory, LocalRanks(directory)
        self.name = f"the run directory {directory}"

    def node(self) -> NodeState:
        """Return the state of the node. Raise UsageError if the directory cannot be read."""
        return self._ranks.node()

    def why(self, found: FoundRank) -> RankWhy:
        """Return why the memory of a rank is as it is."""
        return self._ranks.why(found.gpu.uuid, found.rank.id) or RankWhy()

    def recordings(self, found: FoundRank) -> list[SnapshotFile]:
        """Return the snapshots that lie beside the sample of a rank."""
        sample = self._ranks.sample_file(found.rank.id)
        return list(_recordings(sample)) if sample else []

    def reports(self) -> list[OomRow]:
        """Return the OOM reports in the directory, the newest first."""
        with suppress(UsageError):
            return [ooms.of_report(*each) for each in load_all(self._directory, limit=MAX_REPORTS)]
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
        return Explanation(ooms.of_report(path, report), words, leak_documents(leaking))


def _recordings(sample: Path) -> Iterator[SnapshotFile]:
    for suffix in RECORDINGS:
        path = sibling_path(sample, suffix)
        with suppress(OSError):
            yield SnapshotFile(str(path), path.lstat().st_mtime)
