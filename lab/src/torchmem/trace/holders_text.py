"""What holds the memory of a snapshot, as text for terminals of at least 88 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchmem.allocator.sizes import format_size
from torchmem.output.terminal import aligned, joined, wrapped
from torchmem.sample.untrusted import sanitize_text
from torchmem.trace.holders import HolderGroup, Holders
from torchmem.trace.leaks import PARTS, WARMUP_PARTS, Leak
from torchmem.trace.lifetimes import At

MAX_KEY = 56
"""Columns for a line of code; longer ones show their end."""
_LATER = PARTS - WARMUP_PARTS
MOMENTS: dict[At, str] = {
    "end": "at the end of the recording",
    "peak": "at the peak of the recording",
    "oom": "at the OutOfMemoryError",
}


NO_STACKS = (
    "The snapshot has no Python stacks: record with "
    'torch.cuda.memory._record_memory_history(stacks="python") to see lines.'
)


def tables(found: Holders, rows: int) -> list[list[str]]:
    """Return the sections of what is in use, with at most `rows` rows per table."""
    titled = (
        ("By line", found.by_line),
        ("By module path, from the outermost forward inwards", found.by_module),
        ("By range of torch.profiler.record_function", found.by_annotation),
        ("By metadata of torch.cuda.memory._set_memory_metadata", found.by_metadata),
        ("By region of torch.compile", found.by_region),
        ("By size of the request", found.by_size),
        ("By age", found.by_age),
        ("By pool", found.by_pool),
    )
    sections = [
        [title, *table(groups, found.size_bytes, rows)] for title, groups in titled if groups
    ]
    if not found.has_stacks:
        sections.append(wrapped(NO_STACKS))
    return sections


def leaks_page(found: Holders, leaks: Sequence[Leak] | None, rows: int) -> str:
    """Return the page about lines whose memory grows; None if the recording is too short."""
    sections = [list(heading(found))]
    if leaks is None:
        text = "The recording is too short to tell: record a few hundred steps."
        sections.append(wrapped(text))
    elif not leaks:
        text = (
            f"No line kept memory steadily in the last {_LATER} of {PARTS} parts of the recording."
        )
        sections.append(wrapped(text))
    else:
        sections.append(grown(leaks, rows))
    return joined(sections)


def grown(leaks: Sequence[Leak], rows: int) -> list[str]:
    """Return the section about lines whose memory grows."""
    title = f"Lines that kept memory in each of the last {_LATER} of {PARTS} parts of the recording"
    header = ["  line", "kept", "per part", "blocks"]
    found = [
        [
            f"  {shown_line(leak.line.text)}",
            format_size(leak.size_bytes),
            format_size(sum(leak.parts[WARMUP_PARTS:]) // _LATER),
            f"{leak.blocks:,}",
        ]
        for leak in leaks[:rows]
    ]
    return [title, *aligned([header, *found]), *_more(len(leaks), rows)]


def heading(found: Holders) -> Iterator[str]:
    """Yield the lines that say which moment it is, and how much is in use."""
    yield f"{sanitize_text(found.name)}, cuda:{found.device}, {MOMENTS[found.at]}"
    rounding = ""
    if found.rounding_bytes is not None:
        rounding = f"; rounding adds {format_size(max(0, found.rounding_bytes))}"
    yield f"  {format_size(found.size_bytes)} requested in {found.blocks:,} blocks{rounding}"
    if found.request:
        by = f" at {shown_line(found.request.key)}" if found.request.line else ""
        yield f"  failed: {format_size(found.request.size_bytes)}{by}"
    if found.events:
        seconds = "" if found.seconds is None else f", {found.seconds:,.1f} s after the first"
        yield f"  after {found.moment:,} of {found.events:,} events{seconds}"
    else:
        yield "  without a trace of events, so neither age nor peak is known"


def table(groups: Sequence[HolderGroup], total: int, rows: int) -> Iterator[str]:
    """Yield a row for each group, with its share of `total`."""
    cells = [
        [
            f"  {shown_line(group.key)}",
            format_size(group.size_bytes),
            f"{group.size_bytes / total:.1%}" if total else "-",
            f"{group.blocks:,}",
        ]
        for group in groups[:rows]
    ]
    yield from aligned([["", "requested", "share", "blocks"], *cells])
    yield from _more(len(groups), rows)


def _more(number: int, rows: int) -> Iterator[str]:
    if number > rows:
        yield f"  and {number - rows:,} more (--top {number} shows all)"


def shown_line(text: str) -> str:
    """Return a line of code, or its end if it is long."""
    text = sanitize_text(text)
    return text if len(text) <= MAX_KEY else "…" + text[1 - MAX_KEY :]
