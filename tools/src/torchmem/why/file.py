"""What a file is, by its content, and the answer about it."""

from __future__ import annotations

from pathlib import Path

from torchmem.explain.oom_report import LIST_THEM
from torchmem.explain.run_summary import SUMMARY_SUFFIX
from torchmem.node.ranks import ProcessFilter
from torchmem.node.summaries import last_summary, read_summary
from torchmem.sample.capture_messages import SNAPSHOT_SUFFIX
from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import (
    HEAD_BYTES,
    MAX_FILE_BYTES,
    OOM_REPORT,
    SAMPLE,
    SNAPSHOT,
    SUMMARY,
    FileKind,
    check_kind,
    kind_of,
)
from torchmem.sample.run_directory import REPORT_SUFFIX, SAMPLE_SUFFIX
from torchmem.sample.untrusted import UntrustedFileError, open_untrusted, sanitize_text
from torchmem.why.answer import Answer
from torchmem.why.local import LocalNode
from torchmem.why.node_answers import NodeTools
from torchmem.why.snapshot import SnapshotAnswer, SnapshotView
from torchmem.why.summary import SummaryAnswer

WANTED = "an OOM report, a memory snapshot, or the summary or sample of a run"
_SUFFIXES = {
    REPORT_SUFFIX: OOM_REPORT,
    SUMMARY_SUFFIX: SUMMARY,
    SAMPLE_SUFFIX: SAMPLE,
    SNAPSHOT_SUFFIX: SNAPSHOT,
}
"""What a damaged file was meant to be, so that the error says what is wrong with it."""


def file_answer(path: Path, view: SnapshotView, thresholds: Path | None) -> Answer:
    """Return the answer about a file, which any user may have written. Raise UsageError."""
    kind = _kind(path)
    if kind is SNAPSHOT:
        return SnapshotAnswer(path, view)
    if view != SnapshotView():
        raise UsageError(
            f"--at, --leaks, --gpu and --top look into a memory snapshot: "
            f"{sanitize_text(str(path))} is {kind.noun}."
        )
    if kind is OOM_REPORT:
        return NodeTools(LocalNode(path.parent)).explain_oom(str(path), ProcessFilter())
    if kind is SAMPLE:
        return _published(path, thresholds) or SummaryAnswer(path, last_summary(path))
    return SummaryAnswer(path, read_summary(path))


def _published(path: Path, thresholds: Path | None) -> Answer | None:
    """Return the answer about the process whose sample lies in a run directory."""
    file = path.absolute()
    node = LocalNode(file.parent.parent, thresholds)
    try:
        found = node.id_of(file)
    except UsageError:
        return None
    return NodeTools(node).about(found) if found else None


def _kind(path: Path) -> FileKind:
    name = sanitize_text(str(path))
    try:
        with open_untrusted(path, MAX_FILE_BYTES) as (file, _):
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        raise UsageError(f"{name} does not exist: {LIST_THEM}") from None
    except (UntrustedFileError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        step = "pass a run directory with --run-dir, or " if path.is_dir() else ""
        raise UsageError(f"{name} {reason}: {step}name {WANTED}.") from None
    meant = next((kind for end, kind in _SUFFIXES.items() if path.name.endswith(end)), None)
    kind = kind_of(head) or meant
    if not head:
        raise UsageError(f"{name} is empty: name {WANTED}.")
    if kind is None or kind not in _SUFFIXES.values():
        check_kind(path, head, None, WANTED)
        raise UsageError(f"{name} is {_other(head)}, not {WANTED}: {LIST_THEM}")
    return kind


def _other(head: bytes) -> str:
    """Return what a file of no known kind is, as far as its first bytes tell."""
    if head.lstrip()[:1] in {b"{", b"["}:
        return "JSON of another program"
    return "a binary file of an unknown kind" if b"\0" in head else "text"
