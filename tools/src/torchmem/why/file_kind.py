"""What a file is that `torchmem why` explains, by its content. A text is the last resort."""

from __future__ import annotations

from pathlib import Path

from torchmem.explain.oom_report import LIST_THEM
from torchmem.explain.run_summary import SUMMARY_SUFFIX
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

WANTED = "an OOM report, a memory snapshot, the summary or sample of a run, or a text"
TEXT = FileKind("a text", "run `torchmem why {file}`")
_SUFFIXES = {
    REPORT_SUFFIX: OOM_REPORT,
    SUMMARY_SUFFIX: SUMMARY,
    SAMPLE_SUFFIX: SAMPLE,
    SNAPSHOT_SUFFIX: SNAPSHOT,
}
"""What a damaged file was meant to be, so that the error says what is wrong with it."""
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def kind_of_path(path: Path) -> FileKind:
    """Return what a file is. Raise UsageError if it cannot be read, or is nothing of WANTED."""
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
    if not head:
        raise UsageError(f"{name} is empty: name {WANTED}.")
    meant = next((kind for end, kind in _SUFFIXES.items() if path.name.endswith(end)), None)
    kind = kind_of_head(head) if meant is None else kind_of(head) or meant
    if kind is None:
        check_kind(path, head, None, WANTED)
        raise UsageError(f"{name} is a binary file of an unknown kind: name {WANTED}.")
    return kind


def kind_of_head(head: bytes) -> FileKind | None:
    """Return what begins with these bytes, of which `torchmem why` explains all; else None."""
    kind = kind_of(head)
    if kind is None and (b"\0" not in head or head.startswith(_UTF16_MARKS)):
        return TEXT
    return kind if kind in _SUFFIXES.values() else None
