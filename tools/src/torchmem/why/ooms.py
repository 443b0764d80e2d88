"""The OutOfMemoryErrors of a node: the reports on disk, and the newest one of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchmem.explain.headline import headline
from torchmem.explain.oom_report import OomReport
from torchmem.node.ranks import ProcessFilter
from torchmem.node.state import LastOom
from torchmem.sample.launch import is_launch, owned_launch
from torchmem.sample.sample import Process
from torchmem.why.source import (
    MAX_REPORTS,
    Explanation,
    FoundRank,
    NodeSource,
    OomRow,
    ranks_on_gpus,
    selects,
)


def of_report(path: Path, report: OomReport) -> OomRow:
    """Return the error of a report on disk."""
    process, launch = report.process, _launch(path, report.process)
    error, verdict = LastOom.of(report.oom), headline(report)
    return OomRow(process.run, launch, process.rank, process.pid, error, verdict, str(path))


def _launch(report: Path, process: Process) -> str | None:
    """Return the launch in the label, which names the owner of the file."""
    with suppress(OSError):
        if is_launch(process.launch):
            return owned_launch(process.launch, report.stat().st_uid)
    return None


def newest(
    source: NodeSource, limit: int | None = MAX_REPORTS
) -> list[tuple[OomRow, FoundRank | None]]:
    """Return the newest errors, each with its rank, or with None if a report on disk has it."""
    on_disk = list(source.reports(limit))
    known = {_key(row) for row in on_disk}
    found: list[tuple[OomRow, FoundRank | None]] = [(row, None) for row in on_disk]
    found += [each for each in _of_ranks(source) if _key(each[0]) not in known]
    return sorted(found, key=lambda each: -(each[0].oom.timestamp or 0.0))[:limit]


def explained(source: NodeSource, file: str | None, selected: ProcessFilter) -> Explanation | None:
    """Explain the error of a file, else the newest one of the ranks that match, if there is one."""
    if file is not None:
        return source.explain(file)
    for row, rank in newest(source):
        if not selects(selected, row):
            continue
        if rank is None and row.file is not None:
            return source.explain(row.file)
        oom = source.why(rank).oom if rank else None
        if oom is not None:
            return Explanation(row, oom)
    return None


def _of_ranks(source: NodeSource) -> Iterator[tuple[OomRow, FoundRank]]:
    for found in ranks_on_gpus(source.node()):
        rank, oom = found.rank, found.rank.last_oom
        if oom is not None:
            verdict = _headline(source, found, oom)
            yield OomRow(rank.run, rank.launch, rank.rank, rank.pid, oom, verdict), found


def _headline(source: NodeSource, found: FoundRank, oom: LastOom) -> str:
    """Return the verdict of a rank's report, or cause and onset if the report is gone."""
    explained = source.why(found).oom
    words = (oom.cause, oom.onset)
    return explained.summary if explained else ", ".join(word for word in words if word)


def _key(row: OomRow) -> tuple[object, ...]:
    return row.run, row.launch, row.rank, row.oom.timestamp
