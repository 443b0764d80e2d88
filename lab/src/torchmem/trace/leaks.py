"""Lines whose memory grows: they keep allocating throughout a recording and never free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torchmem.explain.growth import MEASURED_EXACTLY, judge_growth
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


def is_long_enough(lifetimes: Lifetimes, moment: int | None = None) -> bool:
    """Return whether a recording has enough events to be divided, up to a moment."""
    return _end(lifetimes, moment) >= PARTS * MIN_EVENTS_PER_PART


def leaks(lifetimes: Lifetimes, moment: int | None = None) -> tuple[Leak, ...]:
    """Return the lines that kept memory steadily in the parts after the first ones.

    The largest come first. `moment` is the number of the event before which the recording is
    divided, by default its end.

    The parts have equally many events. What a step needs is freed in the step, and what the
    program keeps for good is allocated at its start, so neither is in all of these parts.
    """
    lines = LineFinder(lifetimes)
    parts: dict[HolderLine, list[int]] = {}
    blocks: dict[HolderLine, int] = {}
    end = _end(lifetimes, moment)
    for number in lifetimes.in_use(end):
        start = lifetimes.starts[number]
        if start == BEFORE:
            continue
        line = lines.line(lifetimes.stacks[number])
        parts.setdefault(line, [0] * PARTS)[start * PARTS // end] += lifetimes.sizes[number]
        blocks[line] = blocks.get(line, 0) + 1
    found = (
        Leak(line, tuple(sizes), blocks[line]) for line, sizes in parts.items() if _grows(sizes)
    )
    return tuple(sorted(found, key=lambda leak: (-leak.size_bytes, leak.line.text)))


def _end(lifetimes: Lifetimes, moment: int | None) -> int:
    return lifetimes.events if moment is None else moment


def _grows(sizes: Sequence[int]) -> bool:
    """Return whether what a line has kept grows from part to part."""
    # The last part of the warm-up is what growth starts from.
    kept = list(enumerate(accumulate(sizes), 1))
    return judge_growth("kept", kept[WARMUP_PARTS - 1 :], MEASURED_EXACTLY) is not None
