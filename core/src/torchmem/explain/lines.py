"""Which lines of Python hold the allocated memory, by the stacks that PyTorch recorded.

A block has a stack if memory history was recorded when it was allocated, and if the requesting
thread ran Python code, which autograd's threads do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from torchmem.allocator.snapshot import FrameInfo, SegmentInfo
from torchmem.explain.activity import loads
from torchmem.explain.call_stack import FRAMEWORK, Frame, line_index, package_of
from torchmem.sample.untrusted import MAX_TEXT

MAX_LINES = 10
"""The number of lines in a report."""
MAX_DIVIDED = 3
"""Lines of each list that are divided into parts."""
MAX_PARTS = 5
"""The most parts of one line; the rest belongs to no part."""
MAX_CALLERS = 3
MAX_STACKS = 2000
"""The number of stacks that are divided into parts, those with the most bytes."""

MIN_EXPLAINED = 0.5
"""The share of a growth that one line must have to be named in the headline."""

ModuleOf = Callable[[Sequence[FrameInfo]], "str | None"]
"""Returns the module whose `forward` a stack runs, by its path; None if that is unknown."""


@dataclass(frozen=True, slots=True)
class LinePart:
    """What one line has allocated in one way: for one module, called from the same lines.

    Attributes:
        callers: lines of the same program that called it, the innermost first.
        module: the module's path as in `named_modules`, with `*` for names that cannot be told
            apart; None if not known.
    """

    bytes: int
    blocks: int
    callers: tuple[Frame, ...] = ()
    module: str | None = None


@dataclass(frozen=True, slots=True)
class LineUse:
    """Bytes and number of the blocks that one line has allocated and that are in use.

    `parts` divide them by caller and module, the largest first, as far as that is known. `loads`:
    whether the line reads a checkpoint into GPU memory.
    """

    frame: Frame
    bytes: int
    blocks: int
    parts: tuple[LinePart, ...] = ()
    loads: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines that hold the memory of one device.

    Attributes:
        held: the lines with the most bytes, largest first.
        other_bytes: of all other lines.
        unknown_bytes: of blocks without a stack.
        grown: the lines whose bytes grew most between two steps' ends, and by how much.
        grown_steps: the number of steps between these two.
    """

    held: tuple[LineUse, ...]
    other_bytes: int
    unknown_bytes: int
    grown: tuple[LineUse, ...] = ()
    grown_steps: int = 0


Uses = Mapping["Frame | None", LineUse]


def lines(segments: Iterable[SegmentInfo], device: int) -> Lines | None:
    """Return the lines that hold the memory of a device; None if no block has a stack."""
    uses = uses_by_line(segments, device)
    unknown = sum(use.bytes for frame, use in uses.items() if frame is None)
    known = _largest(use for frame, use in uses.items() if frame is not None)
    if not known:
        return None
    rest = sum(use.bytes for use in known[MAX_LINES:])
    return Lines(tuple(known[:MAX_LINES]), rest, unknown)


def uses_by_line(segments: Iterable[SegmentInfo], device: int) -> dict[Frame | None, LineUse]:
    """Return the use of each line; blocks without a stack are under None."""
    sums: dict[Frame | None, LineUse] = {}
    for stack in _stacks(segments, device):
        frame = line_of(stack.frames)
        known = sums.get(frame) or LineUse(frame or Frame("", None, ""), 0, 0)
        size, blocks = known.bytes + stack.bytes, known.blocks + stack.blocks
        is_loading = known.loads or any(loads(each["filename"]) for each in stack.frames)
        sums[frame] = LineUse(known.frame, size, blocks, loads=is_loading)
    return sums


@dataclass(slots=True)
class _Stack:
    """What was allocated under one stack."""

    frames: Sequence[FrameInfo]
    bytes: int = 0
    blocks: int = 0


def _stacks(segments: Iterable[SegmentInfo], device: int) -> Iterable[_Stack]:
    """Return the stacks of the blocks in use; PyTorch has one dict for each frame."""
    found: dict[tuple[int, ...], _Stack] = {}
    for segment in segments:
        if segment["device"] == device:
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    frames = block.get("frames") or []
                    key = tuple(map(id, frames))
                    stack = found.get(key) or found.setdefault(key, _Stack(frames))
                    stack.bytes += block["size"]
                    stack.blocks += 1
    return found.values()


def line_of(frames: Sequence[FrameInfo]) -> Frame | None:
    """Return the user's line in a block's stack; None without a stack."""
    return _frame(frames[recorded_line(frames)]) if frames else None


def recorded_line(frames: Sequence[FrameInfo]) -> int:
    """Return the index of the user's line in a recorded stack with at least one frame."""
    return line_index(map(_package, frames))


def _package(frame: FrameInfo) -> str | None:
    return package_of(frame["filename"], function=frame["name"])


def _frame(frame: FrameInfo) -> Frame:
    file, function = frame["filename"][-MAX_TEXT:], frame["name"][:MAX_TEXT]
    return Frame(file, frame["line"], function, _package(frame))


def divided(
    found: Lines, segments: Iterable[SegmentInfo], device: int, module_of: ModuleOf
) -> Lines:
    """Return the first lines with their parts, by the blocks that are in use.

    A line of a helper or of one `forward` may hold everything: its callers and modules tell more.
    """
    wanted = {use.frame for use in (*found.held[:MAX_DIVIDED], *found.grown[:MAX_DIVIDED])}
    parts: dict[Frame, dict[_Way, LinePart]] = {frame: {} for frame in wanted}
    for stack in _largest(_stacks(segments, device))[:MAX_STACKS]:
        line = line_of(stack.frames)
        if line in parts:
            way = tuple(islice(_callers(stack.frames), MAX_CALLERS)), module_of(stack.frames)
            known = parts[line].get(way, LinePart(0, 0, *way))
            size, blocks = known.bytes + stack.bytes, known.blocks + stack.blocks
            parts[line][way] = replace(known, bytes=size, blocks=blocks)
    largest = {line: tuple(_largest(ways.values())[:MAX_PARTS]) for line, ways in parts.items()}

    def with_parts(uses: Iterable[LineUse]) -> tuple[LineUse, ...]:
        return tuple(replace(use, parts=largest.get(use.frame, ())) for use in uses)

    return replace(found, held=with_parts(found.held), grown=with_parts(found.grown))


def leaking_line(found: Lines | None, bytes_per_step: float) -> Frame | None:
    """Return the line that explains most of a growth between steps; None if none does."""
    if found is None or not found.grown or not found.grown_steps:
        return None
    most = found.grown[0]
    is_most = most.bytes >= MIN_EXPLAINED * bytes_per_step * found.grown_steps
    return most.frame if is_most else None


def without_parts(found: Lines) -> Lines:
    """Return the lines without their parts, which take less space in a report."""
    held, grown = (
        tuple(replace(use, parts=()) for use in uses) for uses in (found.held, found.grown)
    )
    return replace(found, held=held, grown=grown)


_Way = tuple[tuple[Frame, ...], "str | None"]


def _callers(frames: Sequence[FrameInfo]) -> Iterator[Frame]:
    """Yield the lines that called a stack's line, of the user's code or of the same package.

    A recursion counts as one line.
    """
    index = recorded_line(frames)
    previous = line = _frame(frames[index])
    outer = () if line.package in FRAMEWORK else frames[index + 1 :]
    for frame in outer:
        if _package(frame) == line.package:
            caller = _frame(frame)
            if caller != previous:
                yield caller
            previous = caller


def grown(before: Uses, after: Uses) -> tuple[LineUse, ...]:
    """Return the lines whose bytes grew most, and by how many bytes and blocks."""
    nothing = LineUse(Frame("", None, ""), 0, 0)
    differences = (
        LineUse(frame, use.bytes - earlier.bytes, use.blocks - earlier.blocks)
        for frame, use in after.items()
        if frame is not None
        for earlier in (before.get(frame, nothing),)
    )
    return tuple(_largest(use for use in differences if use.bytes > 0)[:MAX_LINES])


_Sized = TypeVar("_Sized", LineUse, LinePart, _Stack)


def _largest(uses: Iterable[_Sized]) -> list[_Sized]:
    return sorted(uses, key=lambda use: use.bytes, reverse=True)
