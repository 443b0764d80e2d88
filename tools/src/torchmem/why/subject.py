"""What is explained where no file is named: an OOM report, or a running rank."""

from __future__ import annotations

from pathlib import Path

from torchmem.node.ranks import START, ProcessFilter, training_processes
from torchmem.node.reports import newest
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text
from torchmem.why.answer import Answer
from torchmem.why.oom import OomAnswer
from torchmem.why.rank import OomOnDisk, rank_answer, worst_rank


def most_urgent(directory: Path, thresholds: Path | None) -> Answer:
    """Return this user's newest OOM, else the rank that is worst off, else one that has ended.

    Raise UsageError if there is none, or if the newest report cannot be used.
    """
    path = newest(directory)
    if path is not None:
        return OomAnswer.read(path)
    if not any(training_processes(directory)):
        where = sanitize_text(str(directory))
        raise UsageError(f"no OOM report and no process of yours in {where}: {START}")
    return worst_rank(directory, thresholds) or selected(directory, ProcessFilter(), thresholds)


def selected(directory: Path, wanted: ProcessFilter, thresholds: Path | None) -> Answer:
    """Return the process that the filter selects, or the OOM that it died of.

    Raise UsageError if none matches, or several do.
    """
    found = rank_answer(directory, wanted, thresholds)
    return OomAnswer.read(found.path) if isinstance(found, OomOnDisk) else found
