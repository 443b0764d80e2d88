"""Lines whose memory grows: they keep allocating throughout a recording and never free."""

from __future__ import annotations

from dataclasses import dataclass

from torchmem.trace.holders import HolderLine, LineFinder
from torchmem.trace.lifetimes import BEFORE, Lifetimes

PARTS = 8
WARMUP_PARTS = 2
"""The first parts, in which a leak may not have started yet."""
MIN_EVENTS_PER_PART = 8


@dataclass(frozen=True, slots=True)
class Leak:
    """One line: the bytes that it allocated in each part and that are still in use at the end."""

    line: HolderLine
    parts: tuple[int, ...]
    blocks: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts)


def is_long_enough(lifetimes: Lifetimes) -> bool:
    """Return whether a recording has enough events to be divided."""
    return lifetimes.events >= PARTS * MIN_EVENTS_PER_PART


def leaks(lifetimes: Lifetimes) -> tuple[Leak, ...]:
    """Return the lines that kept memory in each part after the first ones, the largest first.

    The parts have equally many events. What a step needs is freed in the step, and what the
    program keeps for good is allocated at its start, so neither is in all of these parts.
    """
    lines = LineFinder(lifetimes)
    parts: dict[HolderLine, list[int]] = {}
    blocks: dict[HolderLine, int] = {}
    for number in lifetimes.in_use(lifetimes.events):
        start = lifetimes.starts[number]
        if start == BEFORE:
            continue
        line = lines.line(lifetimes.stacks[number])
        parts.setdefault(line, [0] * PARTS)[start * PARTS // lifetimes.events] += lifetimes.sizes[
            number
        ]
        blocks[line] = blocks.get(line, 0) + 1
    found = (
        Leak(line, tuple(sizes), blocks[line])
        for line, sizes in parts.items()
        if all(sizes[WARMUP_PARTS:])
    )
    return tuple(sorted(found, key=lambda leak: (-leak.size_bytes, leak.line.text)))
