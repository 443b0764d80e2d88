"""Which lines of Python hold the allocated memory, by the stacks that PyTorch recorded.

A block has a stack if memory history was recorded when it was allocated, and if the thread that
asked ran Python code, which autograd's threads do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchmem.allocator.call_stack import Frame, own_index, package_of
from torchmem.allocator.snapshot import BlockInfo, SegmentInfo
from torchmem.sample.untrusted import MAX_TEXT

MAX_LINES = 10
"""The number of lines in a report."""


@dataclass(frozen=True, slots=True)
class LineUse:
    """Bytes and number of the blocks that one line has allocated and that are in use."""

    frame: Frame
    bytes: int
    blocks: int


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
    sums: dict[Frame | None, list[int]] = {}
    for segment in segments:
        if segment["device"] == device:
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    entry = sums.setdefault(line_of(block), [0, 0])
                    entry[0] += block["size"]
                    entry[1] += 1
    unknown = Frame("", None, "")
    return {frame: LineUse(frame or unknown, *entry) for frame, entry in sums.items()}


def line_of(block: BlockInfo) -> Frame | None:
    """Return the innermost line of the user's own code in the block's stack; None without one.

    If there is none, it is the innermost line of all.
    """
    frames = block.get("frames")
    if not frames:
        return None
    frame = frames[own_index(package_of(frame["filename"]) for frame in frames) or 0]
    file = frame["filename"]
    return Frame(file[-MAX_TEXT:], frame["line"], frame["name"][:MAX_TEXT], package_of(file))


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


def _largest(uses: Iterable[LineUse]) -> Sequence[LineUse]:
    return sorted(uses, key=lambda use: use.bytes, reverse=True)
