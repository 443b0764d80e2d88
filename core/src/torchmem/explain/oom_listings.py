"""Lists about an OutOfMemoryError: who requested the memory, what held it, what to record."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torchmem.allocator.sizes import format_size
from torchmem.allocator.tensor_groups import Role, TensorGroup
from torchmem.explain.call_stack import Frame
from torchmem.explain.lines import LinePart, Lines, LineUse
from torchmem.explain.oom_report import OomReport
from torchmem.explain.where import place, short_place, where

UNKNOWN = "(no stack: allocated before the recording, or by the backward pass)"
MAX_KNOWN = 70
"""Columns for the description of a part; of a longer one, the innermost end is shown."""
MIN_SHARE = 0.005
"""Smaller groups of tensors are left out."""
NOT_IN_PYTHON = "(not found in Python: temporary, kept by autograd, or by libraries)"
_ROLES: Mapping[Role, str] = {"parameter": " (parameters)", "output": " (with graphs)"}
GROWING = frozenset({"leak", "larger_step"})


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines of text under their title."""

    title: str
    lines: tuple[str, ...]


def program_lines(report: OomReport) -> Iterator[str]:
    """Yield what tells about the program: its call stack, its lines, and its tensors."""
    yield from where(report)
    yield from held_lines(report)
    yield from tensor_lines(report)


def oom_lines(report: OomReport) -> Iterator[str]:
    """Yield the lines of all lists."""
    yield from program_lines(report)
    yield from offer(report)


def listings(lines: Iterable[str]) -> list[Listing]:
    """Return lines of text under their titles, which are the lines without an indent."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if not line.startswith(" "):
            found.append((line, []))
        elif found:
            found[-1][1].append(line)
    return [Listing(title, _dedented(below)) for title, below in found if below]


def _dedented(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(textwrap.dedent("\n".join(lines)).split("\n"))


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


def tensor_lines(report: OomReport) -> Iterator[str]:
    """Yield the lines of the section; none if the tensors are unknown."""
    if not report.tensors:
        return
    yield "What the tensors are"
    allocator = report.device.allocator
    known = sum(group.bytes for group in report.tensors)
    total = max(known, allocator.allocated_bytes.total if allocator else 0)
    for group in report.tensors:
        if group.bytes >= MIN_SHARE * total:
            yield f"  {format_size(group.bytes):>12}  {_kind(group)}"
    if total - known >= MIN_SHARE * total:
        yield f"  {format_size(total - known):>12}  {NOT_IN_PYTHON}"


def _kind(group: TensorGroup) -> str:
    """Return a group as "216 × [8, 128, 8000] float32 (parameters)"."""
    if group.shape is None or group.dtype is None:
        return f"{group.count:,} × other shapes"
    role = _ROLES[group.role] if group.role else ""
    return f"{group.count:,} × [{', '.join(map(str, group.shape))}] {group.dtype}{role}"


def offer(report: OomReport) -> Iterator[str]:
    """Yield the lines to add to a job whose memory grew, if no line that grew is known.

    A single step that needs more comes without a warning, so it would not be recorded.
    """
    why = report.verdict.why if report.verdict else None
    is_sudden = why is not None and why.bytes_per_step is None
    if report.oom.onset not in GROWING or is_sudden:
        return
    if report.lines is None:
        yield "To see which lines hold the memory at the next OutOfMemoryError"
        yield from _ways('"oom"')
    elif not report.lines.grown and report.oom.onset == "leak":
        yield "The recording began too late to tell which lines grew. To record from the start"
        yield from _ways("True")


def _ways(value: str) -> Iterator[str]:
    call = f"sdk.instrument(history={value})"
    yield f"         {call:<33}# in the script, or"
    variable = value.strip('"').lower()
    yield f"         TORCHMEM_HISTORY={variable} torchmem run -- COMMAND"
