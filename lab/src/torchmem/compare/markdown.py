"""A comparison as Markdown, for the comment of a pull request.

The picture is a Mermaid chart, which GitHub and GitLab draw: a comment cannot contain an image
that is not published somewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmem.allocator.sizes import GIB, MIB, format_size
from torchmem.compare.baseline import Compared, Outcome
from torchmem.compare.peak_lines import KEPT, headline, is_kept, largest_changes, signed, words
from torchmem.compare.peak_memory import Change, PeakDiff
from torchmem.metrics.colors import ATTENTION, GOOD, STATES
from torchmem.sample.errors import UsageError

MAX_DETAILS = 10
MAX_CHANGES = 12
COLORS = (GOOD, ATTENTION, STATES["exited"])
"""Of what decreased, what grew, and what both have."""
THEME = {"themeVariables": {"xyChart": {"plotColorPalette": ", ".join(COLORS)}}}
MARKS: dict[Outcome, str] = {
    "more": "🔴 more",
    "less": "🟢 less",
    "same": "same",
    "new": "new",
    "other": "not compared",
}


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One row of the table. before, now: peaks in bytes, None if unknown."""

    name: str
    outcome: Outcome
    before: int | None
    now: int | None
    diff: PeakDiff | None


def page(compared: Sequence[Compared], *, phantom: bool) -> str:
    """Return the comment on a comparison with a baseline."""
    note = "Measured with PyTorch's own allocator on a phantom GPU, by torchmem."
    return comment(summary(compared), map(_compared_row, compared), [note] if phantom else [])


def comment(title: str, rows: Iterable[ComparedRow], notes: Iterable[str]) -> str:
    """Return what changed in all, a table, details of what changed, and notes, in paragraphs."""
    ordered = sorted(rows, key=lambda each: (list(MARKS).index(each.outcome), each.name))
    blocks = [
        f"### GPU memory: {title}",
        "\n".join(_table(ordered)),
        *(_details(each) for each in ordered[:MAX_DETAILS] if each.outcome in {"more", "less"}),
        *notes,
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _compared_row(each: Compared) -> ComparedRow:
    before = each.diff.before.peak_allocated if each.diff else None
    return ComparedRow(each.name, each.outcome, before, each.entry.memory.peak_allocated, each.diff)


def write(path: Path, text: str) -> None:
    """Write the comment to a file. Raises UsageError if that fails."""
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror}): choose another file for --markdown."
        ) from None


def summary(compared: Sequence[Compared]) -> str:
    """Return how many need more, less, or as much memory."""
    names = {
        "more": "need more",
        "less": "need less",
        "same": "unchanged",
        "new": "new",
        "other": "not compared",
    }
    counts = {name: sum(each.outcome == name for each in compared) for name in names}
    return ", ".join(f"{counts[name]} {text}" for name, text in names.items() if counts[name])


def chart(found: PeakDiff) -> str:
    """Return the components of both peaks as a Mermaid chart; empty if they are unknown.

    Mermaid draws the bars of one row on top of each other, so the bar of what both have covers the
    others except for the difference.
    """
    before, now = found.before.by_component, found.after.by_component
    names = [name for name in now | before if name != "rounding"]
    if not names or not found.before.uses:
        return ""
    pairs = [(before.get(name, 0), now.get(name, 0)) for name in names]
    largest = max(map(max, pairs))
    unit, divisor = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    bars = (*zip(*pairs, strict=True), tuple(map(min, pairs)))
    return "\n".join(
        [
            "```mermaid",
            f"%%{{init: {json.dumps(THEME)}}}%%",
            "xychart-beta horizontal",
            f'    title "{unit} allocated at the peak (orange: more than before, green: less)"',
            f"    x-axis [{', '.join(json.dumps(words(name)) for name in names)}]",
            f"    y-axis 0 --> {largest / divisor * 1.05:.2f}",
            *(f"    bar [{_lengths(sizes, divisor)}]" for sizes in bars),
            "```",
        ]
    )


def _lengths(sizes: Iterable[int], divisor: int) -> str:
    return ", ".join(f"{size / divisor:.2f}" for size in sizes)


def _table(rows: Sequence[ComparedRow]) -> Iterator[str]:
    yield "| | test or run | before | now | change | largest growth |"
    yield "|---|---|---:|---:|---:|---|"
    for each in rows:
        found = each.diff
        change = signed(found.peak_allocated) if found and found.peak_allocated is not None else ""
        grown = headline(found) if found and each.outcome == "more" else None
        name = code(each.name) if each.name else ""
        cells = [MARKS[each.outcome], name, _size(each.before), _size(each.now), change]
        yield f"| {' | '.join([*cells, code(grown) if grown else ''])} |"


def _details(each: ComparedRow) -> str:
    if each.diff is None:
        return ""
    rows = "\n".join(map(_row, largest_changes(each.diff)[:MAX_CHANGES]))
    heading = "| change | component | module | line |\n|---:|---|---|---|"
    parts = [f"<details><summary>{code(each.name or 'the run')}</summary>"]
    kept = escaped(KEPT) if is_kept(each.diff) else ""
    parts += [part for part in (chart(each.diff), rows and f"{heading}\n{rows}", kept) if part]
    return "\n\n".join([*parts, "</details>"])


def _row(change: Change) -> str:
    line = change.line
    where = f"{code(line.place)} {code(line.code) if line.code else ''}".strip() if line else ""
    module = code(change.module) if change.module else ""
    return f"| {signed(change.bytes)} | {words(change.component)} | {module} | {where} |"


def _size(size: int | None) -> str:
    return "" if size is None else format_size(size)


def code(text: str) -> str:
    """Return text as code in a table, whatever characters it has."""
    return f"<code>{escaped(text)}</code>"


def escaped(text: str) -> str:
    """Return text that Markdown and HTML show as it is."""
    named = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "`": "&#96;", "*": "&#42;"}
    named |= {"_": "&#95;", "\n": " ", "@": "&#64;"}  # an @name would notify a user
    return "".join(named.get(character, character) for character in text)
