"""What a run used, and what changed, as lines of text for terminals and logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torchmem.allocator.sizes import format_size
from torchmem.compare.usage import Change, SourceLine, Usage, UsageDiff, Use

MAX_ROWS = 8
MIN_ROW_SHARE = 0.01
"""Smaller uses and changes, of the peak or of the largest change, are added up."""
MAX_CODE = 60


HELD = "What held it at the peak, by component, module and line:"


def held_lines(usage: Usage, heading: str = HELD, most: int = MAX_ROWS) -> Iterator[str]:
    """Yield a heading and what held the memory, the largest first; nothing if that is unknown."""
    if not usage.uses or not usage.peak_allocated:
        return
    yield heading
    ordered = sorted(usage.uses, key=lambda use: -use.bytes)
    limit = MIN_ROW_SHARE * usage.peak_allocated
    shown = [use for use in ordered[:most] if use.bytes >= limit]
    yield from _aligned((format_size(use.bytes), use) for use in shown)
    rest = usage.peak_allocated - sum(use.bytes for use in shown)
    if rest > 0:
        yield f"  {format_size(rest):>12}  all others"


def change_lines(found: UsageDiff, most: int = MAX_ROWS) -> Iterator[str]:
    """Yield a heading and what changed by line, the largest growth first; nothing if nothing."""
    changes = largest_changes(found)
    if not changes:
        return
    yield "What changed, by component, module and line:"
    yield from _aligned((signed(change.bytes), change) for change in changes[:most])


def change_values(found: UsageDiff) -> list[dict[str, Any]]:
    """Return the finest changes known for JSON, the largest growth first."""
    changes = found.by_line or found.by_module or found.by_component
    return [
        {
            "bytes": change.bytes,
            "component": change.component,
            "module": change.module,
            "file": change.line.file if change.line else None,
            "line": change.line.line if change.line else None,
        }
        for change in changes
    ]


def largest_changes(found: UsageDiff) -> list[Change]:
    """Return the finest changes known, without small ones: first growth, then decreases."""
    changes = found.by_line or found.by_module or found.by_component
    largest = max((abs(change.bytes) for change in changes), default=0)
    return [change for change in changes if abs(change.bytes) >= 10 * MIN_ROW_SHARE * largest]


def headline(found: UsageDiff) -> str | None:
    """Return the largest growth in a few words; None if nothing grew.

    Such as "+0.90 GiB activations in encoder.layers.*.attention (model.py:31)".
    """
    changes = (found.by_line, found.by_module, found.by_component)
    grown = next((each[0] for each in changes if each and each[0].bytes > 0), None)
    if grown is None:
        return None
    module = f" in {grown.module}" if grown.module else ""
    line = f" ({grown.line.place})" if grown.line else ""
    return f"{signed(grown.bytes)} {words(grown.component)}{module}{line}"


def signed(size: int) -> str:
    """Return a difference of sizes with its sign."""
    return f"{'-' if size < 0 else '+'}{format_size(abs(size))}"


def words(component: str | None) -> str:
    """Return a component in words."""
    return (component or "").replace("_", " ")


def place(line: SourceLine | None) -> str:
    """Return file and line, and the code at it."""
    if line is None:
        return ""
    code = line.code if len(line.code) <= MAX_CODE else f"{line.code[: MAX_CODE - 1]}…"
    return f"{line.place}  {code}".rstrip()


def _aligned(rows: Iterable[tuple[str, Use | Change]]) -> Iterator[str]:
    cells = [
        (size, words(part.component), part.module or "", place(part.line)) for size, part in rows
    ]
    widths = [max((len(row[column]) for row in cells), default=0) for column in (1, 2)]
    for size, component, module, where in cells:
        text = f"  {size:>12}  {component:<{widths[0]}}  {module:<{widths[1]}}  {where}"
        yield text.rstrip()
