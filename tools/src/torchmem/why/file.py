"""The answer about a file, by its content. A snapshot needs nothing but the standard library."""

from __future__ import annotations

from pathlib import Path

from torchmem.node.summaries import last_summary, read_summary
from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import OOM_REPORT, SAMPLE, SNAPSHOT
from torchmem.sample.untrusted import sanitize_text
from torchmem.why.answer import Answer
from torchmem.why.file_kind import kind_of_path
from torchmem.why.snapshot import SnapshotAnswer, SnapshotView
from torchmem.why.summary import SummaryAnswer


def file_answer(path: Path, view: SnapshotView, thresholds: Path | None) -> Answer:
    """Return the answer about a file other than a text, which any user may have written.

    Raises UsageError.
    """
    kind = kind_of_path(path)
    if kind is SNAPSHOT:
        return SnapshotAnswer(path, view)
    if view != SnapshotView():
        raise UsageError(
            f"--at, --leaks, --gpu and --top look into a memory snapshot: "
            f"{sanitize_text(str(path))} is {kind.noun}."
        )
    if kind is OOM_REPORT:
        return _oom_report(path)
    if kind is SAMPLE:
        return _published(path, thresholds) or SummaryAnswer(path, last_summary(path))
    return SummaryAnswer(path, read_summary(path))


def _oom_report(path: Path) -> Answer:
    from torchmem.node.ranks import ProcessFilter
    from torchmem.why.local import LocalNode
    from torchmem.why.node_answers import NodeTools

    return NodeTools(LocalNode(path.parent)).explain_oom(str(path), ProcessFilter())


def _published(path: Path, thresholds: Path | None) -> Answer | None:
    """Return the answer about the process whose sample lies in a run directory."""
    from torchmem.why.local import LocalNode
    from torchmem.why.node_answers import NodeTools

    file = path.absolute()
    node = LocalNode(file.parent.parent, thresholds)
    try:
        found = node.id_of(file)
    except UsageError:
        return None
    return NodeTools(node).about(found) if found else None
