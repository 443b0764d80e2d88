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


def page(found: Holders, rows: int) -> str:
    """Return the page about one device at one moment, with at most `rows` rows per table."""
    tables = (
        ("By line", found.by_line),
        ("By module path, from the outermost forward inwards", found.by_module),
        ("By size of the request", found.by_size),
        ("By age", found.by_age),
        ("By pool", found.by_pool),
    )
    sections = [list(_heading(found))]
    sections += [
        [title, *_table(groups, found.size_bytes, rows)] for title, groups in tables if groups
    ]
    if not found.has_stacks:
        sections.append(wrapped(NO_STACKS))
    return joined(sections)


def leaks_page(found: Holders, leaks: Sequence[Leak] | None, rows: int) -> str:
    """Return the page about lines whose memory grows; None if the recording is too short."""
    sections = [list(_heading(found))]
    if leaks is None:
        text = "The recording is too short to tell: record a few hundred steps."
        sections.append(wrapped(text))
    elif not leaks:
        text = (
            f"No line kept memory steadily in the last {_LATER} of {PARTS} parts of the recording."
        )
        sections.append(wrapped(text))
    else:
        title = (
            f"Lines that kept memory in each of the last {_LATER} of {PARTS} parts of the recording"
        )
        header = ["  line", "kept", "per part", "blocks"]
        table = [
            [
                f"  {_key(leak.line.text)}",
                format_size(leak.size_bytes),
                format_size(sum(leak.parts[WARMUP_PARTS:]) // _LATER),
                f"{leak.blocks:,}",
            ]
            for leak in leaks[:rows]
        ]
        sections.append([title, *aligned([header, *table]), *_more(len(leaks), rows)])
    return joined(sections)


def _heading(found: Holders) -> Iterator[str]:
    yield f"{sanitize_text(found.name)}, cuda:{found.device}, {MOMENTS[found.at]}"
    rounding = ""
    if found.rounding_bytes is not None:
        rounding = f"; rounding adds {format_size(max(0, found.rounding_bytes))}"
    yield f"  {format_size(found.size_bytes)} requested in {found.blocks:,} blocks{rounding}"
    if found.request:
        by = f" at {_key(found.request.key)}" if found.request.line else ""
        yield f"  failed: {format_size(found.request.size_bytes)}{by}"
    if found.events:
        seconds = "" if found.seconds is None else f", {found.seconds:,.1f} s after the first"
        yield f"  after {found.moment:,} of {found.events:,} events{seconds}"
    else:
        yield "  without a trace of events, so neither age nor peak is known"


def _table(groups: Sequence[HolderGroup], total: int, rows: int) -> Iterator[str]:
    table = [
        [
            f"  {_key(group.key)}",
            format_size(group.size_bytes),
            f"{group.size_bytes / total:.1%}" if total else "-",
            f"{group.blocks:,}",
        ]
        for group in groups[:rows]
    ]
    yield from aligned([["", "requested", "share", "blocks"], *table])
    yield from _more(len(groups), rows)


def _more(number: int, rows: int) -> Iterator[str]:
    if number > rows:
        yield f"  and {number - rows:,} more (--top {number} shows all)"


def _key(text: str) -> str:
    text = sanitize_text(text)
    return text if len(text) <= MAX_KEY else "…" + text[1 - MAX_KEY :]
