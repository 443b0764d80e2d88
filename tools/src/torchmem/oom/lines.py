"""The lines of Python that held the memory at an OutOfMemoryError, as text."""

from __future__ import annotations

from collections.abc import Iterator

from torchmem.allocator.lines import Lines, LineUse
from torchmem.allocator.oom_report import OomReport
from torchmem.allocator.sizes import format_size
from torchmem.oom.where import place

UNKNOWN = "(no stack: allocated before the recording, or by the backward pass)"


def held_lines(report: OomReport) -> Iterator[str]:
    """Yield the lines of the section; none if no stacks were recorded."""
    if report.lines is None:
        return
    yield "Lines that held the most memory"
    yield from map(_row, _held(report.lines))
    if report.lines.grown:
        steps = report.lines.grown_steps
        yield f"Lines whose memory grew over {steps:,} step{'s' * (steps != 1)}"
        yield from (_row((f"+{format_size(use.bytes)}", use)) for use in report.lines.grown)


def _held(lines: Lines) -> Iterator[tuple[str, LineUse | str]]:
    yield from ((format_size(use.bytes), use) for use in lines.held)
    if lines.other_bytes:
        yield format_size(lines.other_bytes), "(all other lines)"
    if lines.unknown_bytes:
        yield format_size(lines.unknown_bytes), UNKNOWN


def _row(entry: tuple[str, LineUse | str]) -> str:
    size, use = entry
    return f"  {size:>12}  {use if isinstance(use, str) else place(use.frame)}"
