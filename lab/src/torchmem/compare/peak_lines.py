"""What a run used, and what changed, as lines of text for terminals and logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torchmem.allocator.sizes import format_size
from torchmem.compare.peak_memory import HELD, Change, PeakDiff, PeakMemory, SourceLine, Use
from torchmem.output.terminal import wrapped
from torchmem.sample.remedy_words import REMEDY_WORDS

MAX_ROWS = 8
MIN_ROW_SHARE = 0.01
"""Of the peak; smaller uses are added up."""
MIN_CHANGE_SHARE = 0.1
"""Of the largest change; smaller ones are left out."""
MAX_CODE = 60
MIN_KEPT_SHARE = 0.1
"""Of a peak or its growth. Less is what a script's variables keep for one more step."""
AT_PEAK = "What held it at the peak, by component, module and line:"
KEPT = (
    "held: allocated in an earlier step and not freed. The lines are those that allocated it, "
    f"which do not show what keeps it. {REMEDY_WORDS['find_kept']}."
)
"""What to know about this component, and what to look for."""


def held_lines(memory: PeakMemory, heading: str = AT_PEAK) -> Iterator[str]:
    """Yield a heading and what held the memory, the largest first; nothing if that is unknown."""
    if not memory.uses or not memory.peak_allocated:
        return
    yield heading
    ordered = sorted(memory.uses, key=lambda use: -use.bytes)
    limit = MIN_ROW_SHARE * memory.peak_allocated
    shown = [use for use in ordered[:MAX_ROWS] if use.bytes >= limit]
    yield from _aligned((format_size(use.bytes), use) for use in shown)
    rest = memory.peak_allocated - sum(use.bytes for use in shown)
    if rest > 0:
        yield f"  {format_size(rest):>12}  all others"


def kept_lines(memory: PeakMemory) -> list[str]:
    """Return what to look for if steps keep much of the peak, else nothing."""
    is_much = memory.by_component.get(HELD, 0) > MIN_KEPT_SHARE * (memory.peak_allocated or 0)
    return wrapped(KEPT) if is_much else []


def is_kept(found: PeakDiff) -> bool:
    """Return whether a peak grew because steps keep more."""
    return found.held > MIN_KEPT_SHARE * (found.peak_allocated or 0)


def change_lines(found: PeakDiff) -> Iterator[str]:
    """Yield a heading and what changed by line, the largest growth first; nothing if nothing.

    Each component that grew has a row, and what to look for follows if steps keep more.
    """
    changes = _with_all_components(largest_changes(found))
    if not changes:
        return
    yield "What changed, by component, module and line:"
    yield from _aligned((signed(change.bytes), change) for change in changes)
    if is_kept(found):
        yield from wrapped(KEPT)


def _with_all_components(changes: list[Change]) -> list[Change]:
    """Return the first changes, of which each component that grew has at least one."""
    first = {each.component: each for each in reversed(changes) if each.bytes > 0}
    others = [each for each in changes if each not in first.values()]
    chosen = [*first.values(), *others[: max(0, MAX_ROWS - len(first))]]
    return [each for each in changes if each in chosen]


def change_values(found: PeakDiff) -> list[dict[str, Any]]:
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


def largest_changes(found: PeakDiff) -> list[Change]:
    """Return the finest changes known, without small ones: first growth, then decreases."""
    changes = found.by_line or found.by_module or found.by_component
    largest = max((abs(change.bytes) for change in changes), default=0)
    return [change for change in changes if abs(change.bytes) >= MIN_CHANGE_SHARE * largest]


def headline(found: PeakDiff) -> str | None:
    """Return the largest growth of the component that grew most; None if nothing grew.

    Such as "+0.90 GiB activations in encoder.layers.*.attention (model.py:31)".
    """
    most = next(iter(found.by_component), None)
    if most is None or most.bytes <= 0:
        return None
    changes = (*found.by_line, *found.by_module, most)
    grown = next(each for each in changes if each.component == most.component and each.bytes > 0)
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
