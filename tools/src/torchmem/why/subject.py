"""What is explained where no file is named: an OOM report, or a running rank."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torchmem.capture.processes import START, ProcessFilter
from torchmem.node.reports import newest
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text
from torchmem.why.answer import Answer
from torchmem.why.oom import OomAnswer
from torchmem.why.rank import OomOnDisk, rank_answer, worst_rank


def most_urgent(directory: Path, thresholds: Path | None) -> Answer:
    """Return this user's newest OOM, else the running rank that is worst off. Raise UsageError."""
    with suppress(UsageError):
        return OomAnswer.read(newest(directory))
    found = worst_rank(directory, thresholds)
    if found is None:
        raise UsageError(
            f"no OOM report and no running process of yours in {sanitize_text(str(directory))}: "
            f"{START}"
        )
    return found


def selected(directory: Path, wanted: ProcessFilter, thresholds: Path | None) -> Answer:
    """Return the process that the filter selects, or the OOM that it died of.

    Raise UsageError if none matches, or several do.
    """
    found = rank_answer(directory, wanted, thresholds)
    return OomAnswer.read(found.path) if isinstance(found, OomOnDisk) else found
