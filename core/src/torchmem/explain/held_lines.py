"""Print the Python lines that held the memory at an OutOfMemoryError."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from torchmem.allocator.sizes import format_size
from torchmem.explain.call_stack import Frame
from torchmem.explain.lines import LinePart, Lines, LineUse
from torchmem.explain.oom_report import OomReport
from torchmem.explain.where import place, short_place

UNKNOWN = "(no stack: allocated before the recording, or by the backward pass)"
MAX_KNOWN = 70
"""Columns for the description of a part; of a longer one, the innermost end is shown."""


def held_lines(report: OomReport) -> Iterator[str]:
    """Yield the lines that grew, then the lines that held most; none without recorded stacks."""
    if report.lines is None:
        return
    if report.lines.grown:
        steps = report.lines.grown_steps
        yield f"Lines whose memory grew over {steps:,} step{'s' * (steps != 1)}"
        yield from _rows((f"+{format_size(use.bytes)}", use) for use in report.lines.grown)
    yield "Lines that held the most memory"
    yield from _rows(_held(report.lines), {use.frame for use in report.lines.grown})


def _held(lines: Lines) -> Iterator[tuple[str, LineUse | str]]:
    yield from ((format_size(use.bytes), use) for use in lines.held)
    if lines.other_bytes:
        yield format_size(lines.other_bytes), "(all other lines)"
    if lines.unknown_bytes:
        yield format_size(lines.unknown_bytes), UNKNOWN


def _rows(
    entries: Iterable[tuple[str, LineUse | str]], divided: Container[Frame] = ()
) -> Iterator[str]:
    """Yield the lines with their parts, unless they were `divided` above."""
    for size, use in entries:
        yield f"  {size:>12}  {use if isinstance(use, str) else place(use.frame)}"
        if isinstance(use, LineUse) and use.frame not in divided:
            yield from _parts(use.parts)


def _parts(parts: tuple[LinePart, ...]) -> Iterator[str]:
    """Yield what is known beyond the line: for which module, and called from where.

    One part is all of its line, so its size would say nothing.
    """
    for part in parts:
        size = format_size(part.bytes) if len(parts) > 1 else ""
        words = [part.module or "", *map(_caller, part.callers)]
        known = " ".join(word for word in words if word)[:MAX_KNOWN]
        if known:
            yield f"  {'':>12}  {size:>12}  {known}" if size else f"  {'':>12}    {known}"


def _caller(frame: Frame) -> str:
    return f"← {short_place(frame)}"
