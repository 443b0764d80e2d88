"""The records of a node in words: the text of each answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import format_seconds
from torchmem.node.state import OomWhy, RankWhy
from torchmem.node.words import WIDTH, labeled, listing_lines, local_time, memory_lines
from torchmem.output.terminal import joined, wrapped
from torchmem.sample.untrusted import sanitize_text
from torchmem.top.reading import rank_lines
from torchmem.why.source import FoundRank, OomRow, SnapshotFile


def report_page(found: FoundRank, why: RankWhy) -> str:
    """Return the report of a rank, as `torchmem top` shows it."""
    return joined([rank_lines(found.gpu, found.rank, why, found.time, WIDTH)])


def holders_page(found: FoundRank, why: RankWhy, recordings: Sequence[SnapshotFile]) -> str:
    """Return what holds the memory of a rank and of its GPU, and what held it at its OOM."""
    known = [f"  {each.file} ({_ago(found, each.time)} ago)" for each in recordings]
    return joined(
        [
            list(why.heading) or [f"{found}: {found.rank.state}"],
            list(_rank_parts(found)),
            list(memory_lines(found.gpu.total_bytes, labeled(found.gpu.parts))),
            list(_peak(why)),
            *_held(found, why.oom),
            known and ["Recordings of this rank, for read_snapshot", *known],
        ]
    )


def _rank_parts(found: FoundRank) -> Iterator[str]:
    if not found.rank.parts:
        yield "What its memory is used for is not known."
        return
    age = _ago(found, found.rank.stats_time)
    yield f"Memory of the rank{age and f', {age} ago'}"
    for label, size in sorted(labeled(found.rank.parts), key=lambda part: -part[1]):
        yield f"  {label:<32}{format_size(size):>12}"


def _peak(why: RankWhy) -> Iterator[str]:
    parts = ", ".join(f"{each.label} {format_size(each.bytes)}" for each in why.parts_at_peak)
    if parts:
        yield from wrapped(f"At the peak of its tensors: {parts}.", width=WIDTH)


def _held(found: FoundRank, oom: OomWhy | None) -> Iterator[list[str]]:
    if oom and (oom.listings or oom.hidden):
        yield [f"At its OutOfMemoryError, {_ago(found, oom.time)} ago:"]
        yield from listing_lines(oom)


def oom_table(rows: Iterable[OomRow]) -> str:
    """Return a list of OutOfMemoryErrors: the process and its request, the verdict, the file."""
    return "".join(f"{line}\n" for row in rows for line in _oom_lines(row))


def _oom_lines(row: OomRow) -> Iterator[str]:
    size, rank = row.oom.requested_bytes, "-" if row.rank is None else row.rank
    requested = "" if size is None else f"  {format_size(size):>10}"
    yield f"{local_time(row.oom.timestamp)}  {row.run:<16}  rank {rank:<4}{requested}"
    yield from wrapped(f"{row.headline}.", "    ", WIDTH)
    if row.file is not None:
        yield f"    {sanitize_text(row.file)}"


def _ago(found: FoundRank, time: float | None) -> str:
    return "" if time is None else format_seconds(max(0.0, found.time - time))
