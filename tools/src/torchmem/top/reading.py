"""What fills the screen of `torchmem top` for reading: its help, and the report of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torchmem.metrics.memory_parts import PARTS
from torchmem.node.state import GpuState, OomWhy, RankState, RankWhy
from torchmem.node.words import advice_lines, labeled, memory_lines, rank_sections, run_lines, sound
from torchmem.output.terminal import joined, wrapped
from torchmem.top.columns import COLUMNS, GPU_VALUES, MEMORY_PARTS, ScreenColumn
from torchmem.top.keys import KEY_COLUMNS, KEYS

MAX_COLUMNS = 100
"""Wider lines are hard to read."""
FIRST = ("headroom", "FI")
NAME_COLUMNS = 11
PART_COLUMNS = 4 + max(len(part.label) for part in MEMORY_PARTS)


def help_lines(width: int) -> list[str]:
    """Return what the keys do, and what the columns and the parts of the bars mean."""
    columns = min(width, MAX_COLUMNS)
    entries = (_entry(" ".join(key.names), key.does, columns, KEY_COLUMNS) for key in KEYS)
    keys = [line for entry in entries for line in entry]
    return joined(
        [
            ["Keys", *keys],
            ["What to look at first", *_first(columns)],
            ["Columns of a rank", *_explained(COLUMNS, columns)],
            ["Beside the bar of a GPU", *_explained(GPU_VALUES, columns)],
            ["Parts of the bars", *_parts(columns)],
            ["Sizes are in GiB. – is unknown."],
        ]
    ).splitlines()


def _explained(columns: Iterable[ScreenColumn], width: int) -> Iterator[str]:
    for column in columns:
        yield from _entry(column.name, column.meaning, width)


def _first(width: int) -> Iterator[str]:
    yield from _explained((column for column in COLUMNS if column.name in FIRST), width)
    yield from _entry("stranded", PARTS["stranded"].meaning, width)


def _parts(width: int) -> Iterator[str]:
    for part in MEMORY_PARTS:
        yield from _entry(f"{part.letter} {part.label}", part.meaning, width, PART_COLUMNS)


def _entry(name: str, text: str, width: int, columns: int = NAME_COLUMNS) -> list[str]:
    """Return lines with a name before a text, or above it where there is no room beside it."""
    if width < columns + 30:
        return [f"  {name}", *wrapped(text, "    ", width)]
    return wrapped(text, f"  {name:<{columns}}", width)


def rank_lines(
    gpu: GpuState, rank: RankState, answer: RankWhy, now: float | None, width: int
) -> list[str]:
    """Return the report of a rank, as `torchmem why` prints it; with the reason of an OOM.

    One that the rank survived comes last: what it needs now comes first.

    `now` is in Unix seconds.
    """
    columns = min(width, MAX_COLUMNS)
    heading = answer.heading or (f"run {rank.run}, rank {rank.rank}: {rank.state}",)
    oom = _fatal(rank, answer)
    advice = oom.advice if oom else answer.advice
    report = replace(answer, heading=heading, run=sound(answer.run), advice=advice)
    first, *parts = rank_sections(report, _memory(gpu, rank, answer, now, columns), columns)
    error = _error(answer, columns)
    parts = [*error, *parts] if oom else [*parts, *error]
    return joined([first, *_happened(answer, columns), *parts]).splitlines()


def _fatal(rank: RankState, answer: RankWhy) -> OomWhy | None:
    """Return the OutOfMemoryError that a rank died of."""
    return answer.oom if rank.state == "oom" else None


def _memory(
    gpu: GpuState, rank: RankState, answer: RankWhy, now: float | None, width: int
) -> Iterator[str]:
    """Return the use of the GPU; of a rank that died of an OOM, at the error."""
    oom = _fatal(rank, answer)
    read = oom.time if oom else rank.stats_time
    parts = [(part.label, part.bytes) for part in answer.memory]
    if oom:
        parts = labeled(oom.parts)
    age = None if now is None or read is None else max(0.0, now - read)
    return memory_lines(gpu.total_bytes, parts, age, width)


def _happened(answer: RankWhy, width: int) -> Iterator[list[str]]:
    """Yield how the rank ended, if it has, and whether the next request would succeed."""
    if answer.ending:
        yield ["What happened", *wrapped(answer.ending, "  ", width)]
    if answer.next_request:
        yield wrapped(answer.next_request, width=width)


def _error(answer: RankWhy, width: int) -> Iterator[list[str]]:
    """Yield why the newest OutOfMemoryError happened."""
    if answer.oom:
        yield wrapped(f"{answer.oom.summary}.", "Verdict: ", width)
        yield wrapped(f"{answer.oom.reason} {answer.oom.before}", "  ", width)


def whole_run(answer: RankWhy) -> list[str]:
    """Return the lines with the memory of a rank over its whole run; none if it is unknown."""
    return list(run_lines(sound(answer.run)))


def verdict_lines(rank: RankState, answer: RankWhy, width: int) -> Iterator[str]:
    """Yield the verdict on the OOM that a rank died of, if it did, and the best advice."""
    oom = _fatal(rank, answer)
    advice = oom.advice if oom else answer.advice
    if oom and oom.summary:
        yield from wrapped(f"{oom.summary}.", "Verdict: ", width)
    if advice:
        yield from list(advice_lines(advice[:1], width))[1:]  # without the title
