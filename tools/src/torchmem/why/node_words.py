"""The records of a node in words: the text of each answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torchmem.allocator.sizes import format_size
from torchmem.explain.oom_report import format_seconds
from torchmem.explain.parts import PartBytes
from torchmem.metrics.memory_parts import COMPONENTS, PARTS
from torchmem.node.state import OomWhy, RankWhy
from torchmem.node.words import (
    advice_lines,
    fact_lines,
    local_time,
    memory_lines,
    trend_lines,
)
from torchmem.output.terminal import joined, wrapped
from torchmem.sample.untrusted import sanitize_text
from torchmem.top.reading import rank_lines, sound
from torchmem.why.source import Explanation, FoundRank, OomRow, SnapshotFile

WIDTH = 88
MAX_TIME = 1e11
"""Later times, in Unix seconds, cannot be true."""


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
            list(memory_lines(found.gpu.total_bytes, _labeled(found.gpu.parts))),
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
    for label, size in sorted(_labeled(found.rank.parts), key=lambda part: -part[1]):
        yield f"  {label:<32}{format_size(size):>12}"


def _peak(why: RankWhy) -> Iterator[str]:
    parts = ", ".join(f"{each.label} {format_size(each.bytes)}" for each in why.parts_at_peak)
    if parts:
        yield from wrapped(f"At the peak of its tensors: {parts}.", width=WIDTH)


def _held(found: FoundRank, oom: OomWhy | None) -> Iterator[list[str]]:
    if oom and (oom.listings or oom.hidden):
        yield [f"At its OutOfMemoryError, {_ago(found, oom.time)} ago:"]
        yield from _listings(oom)


def oom_table(rows: Iterable[OomRow]) -> str:
    """Return a list of OutOfMemoryErrors: the process and its request, the verdict, the file."""
    return "".join(f"{line}\n" for row in rows for line in _oom_lines(row))


def _oom_lines(row: OomRow) -> Iterator[str]:
    size, rank = row.oom.requested_bytes, "-" if row.rank is None else row.rank
    requested = "" if size is None else f"  {format_size(size):>10}"
    yield f"{_time(row.oom.timestamp)}  {row.run:<16}  rank {rank:<4}{requested}"
    yield from wrapped(f"{row.headline}.", "    ", WIDTH)
    if row.file is not None:
        yield f"    {sanitize_text(row.file)}"


def oom_page(found: Explanation) -> str:
    """Return everything about one OOM, with the lines of `torchmem why`."""
    oom, file = found.oom, found.row.file
    process, *about = oom.about or (f"run {found.row.run}, rank {found.row.rank}",)
    heading = [f"{_time(oom.time)}  {process}", *about]
    return joined(
        [
            [*wrapped(f"{oom.summary}.", width=WIDTH), "", *(f"  {line}" for line in heading)],
            wrapped(oom.reason, width=WIDTH),
            [*memory_lines(oom.total_bytes, _labeled(oom.parts)), *fact_lines(oom.facts)],
            *_listings(oom),
            list(trend_lines(filter(None, map(sound, oom.charts)), oom.before)),
            list(advice_lines(oom.advice)),
            [f"Report: {file}"] if file else [],
        ]
    )


def _listings(oom: OomWhy) -> Iterator[list[str]]:
    for listing in oom.listings:
        yield [listing.title, *(f"  {line}" for line in listing.lines)]
    if oom.hidden:
        yield ["The exporter shows the program's lines only to the rank's own user."]


def _labeled(parts: Iterable[PartBytes]) -> list[tuple[str, int]]:
    return [(part.label or _words(part.name), part.bytes) for part in parts]


def _words(name: str) -> str:
    known = PARTS.get(name) or COMPONENTS.get(name)
    return known.words if known else name


def _ago(found: FoundRank, time: float | None) -> str:
    return "" if time is None else format_seconds(max(0.0, found.time - time))


def _time(time: float | None) -> str:
    return local_time(time) if time is not None and 0 <= time < MAX_TIME else "-"
