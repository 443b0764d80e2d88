"""The comparison with a baseline as Markdown, for the comment of a pull request.

The picture is a Mermaid chart, which GitHub and GitLab draw: a comment cannot contain an image
that is not published somewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchmem.allocator.sizes import GIB, MIB, format_size
from torchmem.compare.baseline import Compared, Outcome
from torchmem.compare.text import KEPT, headline, is_kept, largest_changes, signed, words
from torchmem.compare.usage import Change, UsageDiff

MAX_DETAILS = 10
MAX_CHANGES = 12
MARKS: dict[Outcome, str] = {
    "more": "🔴 more",
    "less": "🟢 less",
    "same": "same",
    "new": "new",
    "other": "not compared",
}


def page(compared: Sequence[Compared], *, phantom: bool) -> str:
    """Return the comment: what changed in all, a table, and details of what needs more."""
    ordered = sorted(compared, key=lambda each: (list(MARKS).index(each.outcome), each.name))
    blocks = [
        f"### GPU memory: {summary(compared)}",
        "\n".join(_table(ordered)),
        *(_details(each) for each in ordered[:MAX_DETAILS] if each.outcome in {"more", "less"}),
    ]
    if phantom:
        blocks.append("Measured with PyTorch's own allocator on a phantom GPU, by torchmem.")
    return "\n\n".join(blocks) + "\n"


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


def chart(found: UsageDiff) -> str:
    """Return the components of both peaks as a Mermaid chart; empty if they are unknown."""
    before, after = found.before.by_component, found.after.by_component
    names = [name for name in after | before if name != "rounding"]
    if not names or not found.before.uses:
        return ""
    sizes = [side.get(name, 0) for name in names for side in (before, after)]
    unit, divisor = ("GiB", GIB) if max(sizes) >= GIB else ("MiB", MIB)
    labels = ", ".join(f'"{words(name)}: {side}"' for name in names for side in ("before", "now"))
    bars = ", ".join(f"{size / divisor:.2f}" for size in sizes)
    return "\n".join(
        [
            "```mermaid",
            "xychart-beta horizontal",
            f'    title "Allocated at the peak, {unit}"',
            f"    x-axis [{labels}]",
            f'    y-axis "{unit}" 0 --> {max(sizes) / divisor * 1.05:.2f}',
            f"    bar [{bars}]",
            "```",
        ]
    )


def _table(compared: Sequence[Compared]) -> Iterator[str]:
    yield "| | test or run | before | now | change | largest growth |"
    yield "|---|---|---:|---:|---:|---|"
    for each in compared:
        found = each.diff
        before = found.before.peak_allocated if found else None
        now = each.entry.usage.peak_allocated
        change = signed(found.peak_allocated) if found and found.peak_allocated is not None else ""
        grown = headline(found) if found and each.outcome == "more" else None
        cells = [MARKS[each.outcome], _code(each.name), _size(before), _size(now), change]
        yield f"| {' | '.join([*cells, _code(grown) if grown else ''])} |"


def _details(each: Compared) -> str:
    if each.diff is None:
        return ""
    rows = "\n".join(map(_row, largest_changes(each.diff)[:MAX_CHANGES]))
    heading = "| change | component | module | line |\n|---:|---|---|---|"
    parts = [f"<details><summary><code>{_escaped(each.name)}</code></summary>"]
    kept = _escaped(KEPT) if is_kept(each.diff) else ""
    parts += [part for part in (chart(each.diff), rows and f"{heading}\n{rows}", kept) if part]
    return "\n\n".join([*parts, "</details>"])


def _row(change: Change) -> str:
    line = change.line
    where = f"{_code(line.place)} {_code(line.code) if line.code else ''}".strip() if line else ""
    module = _code(change.module) if change.module else ""
    return f"| {signed(change.bytes)} | {words(change.component)} | {module} | {where} |"


def _size(size: int | None) -> str:
    return "" if size is None else format_size(size)


def _code(text: str) -> str:
    """Return text as code in a table, whatever characters it has."""
    return f"<code>{_escaped(text)}</code>"


def _escaped(text: str) -> str:
    named = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "`": "&#96;", "*": "&#42;"}
    named |= {"_": "&#95;", "\n": " ", "@": "&#64;"}
    return "".join(named.get(character, character) for character in text)
