"""The Python stacks of a snapshot, and what else it says of each allocation.

Equal stacks, frames and texts are kept once. The worker collects them, and the reader receives them
as flat arrays.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchmem.trace.checked_values import LIMIT, damaged

MAX_FRAMES = 64
"""The number of a stack's innermost frames that are kept."""
MAX_TEXT = 300
MAX_TEXTS = 100_000
NO_STACK = -1
NO_TEXT = -1
UNKNOWN_TIME = -1
_TRACEBACK_LINE = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<name>.*)')


@dataclass(frozen=True, slots=True)
class SnapshotFrame:
    """One frame as PyTorch records it, innermost first in a stack; `line` is 0 if unknown."""

    file: str
    line: int
    function: str


class _Numbered:
    """Replaces the frames of a list that was read, so that another reference to it is known."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class StackTable:
    """Numbers frames, stacks and texts in the order in which they first occur."""

    def __init__(self) -> None:
        self.frames: list[SnapshotFrame] = []
        self.members = array("i")
        self.lengths = array("i")
        self.texts: dict[str, int] = {}
        self._frame_numbers: dict[SnapshotFrame, int] = {}
        self._frames_by_id: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], _Numbered] = {}

    def number(self, frames: object, forward: object = None) -> int:
        """Return the number of a stack, and empty its list; NO_STACK if none was recorded.

        `forward` are the lines of the traceback of the forward pass, which PyTorch 2.13
        writes of what autograd allocates with `detect_anomaly`. They count where there are no
        frames. Frames are recognized by their identity, so they must stay alive.

        Raises:
            InvalidSnapshotError: the stack does not have the form that PyTorch writes.
        """
        if not frames:
            return self._numbered(self._traceback(forward)).number if forward else NO_STACK
        if type(frames) is not list:
            raise damaged("a stack is not a list")
        known = frames[0]
        if type(known) is not _Numbered:
            numbers = self._frames_by_id
            known = self._numbered(
                tuple(
                    [
                        numbers[id(frame)] if id(frame) in numbers else self._frame(frame)
                        for frame in frames[:MAX_FRAMES]
                    ]
                )
            )
            frames[:] = (known,)
        return known.number

    def forget(self, frames: object) -> None:
        """Empty a list of frames that is not needed, unless it was read."""
        if type(frames) is list and frames and type(frames[0]) is not _Numbered:
            frames.clear()

    def text(self, value: object, absent: str = "") -> int:
        """Return the number of a text, NO_TEXT without one."""
        if type(value) is not str or value in {"", absent}:
            return NO_TEXT
        if len(self.texts) >= MAX_TEXTS:
            value = "others"
        return self.texts.setdefault(_shortened(value), len(self.texts))

    def _numbered(self, stack: tuple[int, ...]) -> _Numbered:
        known = self._stacks.get(stack)
        if known is None:
            known = self._stacks[stack] = _Numbered(len(self._stacks))
            self.members.extend(stack)
            self.lengths.append(len(stack))
        return known

    def _traceback(self, lines: object) -> tuple[int, ...]:
        """Return the frames of a traceback, whose innermost line is the last."""
        if type(lines) is not list:
            raise damaged("a traceback is not a list")
        found = (
            _TRACEBACK_LINE.match(line)
            for line in reversed(lines[-MAX_FRAMES:])
            if type(line) is str
        )
        return tuple(
            self._frame_number(
                SnapshotFrame(_shortened(each["file"]), int(each["line"][:9]), each["name"])
            )
            for each in found
            if each
        )

    def _frame(self, value: object) -> int:
        if type(value) is not dict:
            raise damaged("a frame is not a dict")
        frame = SnapshotFrame(
            _text(value.get("filename")), _line(value.get("line")), _text(value.get("name"))
        )
        number = self._frames_by_id[id(value)] = self._frame_number(frame)
        return number

    def _frame_number(self, frame: SnapshotFrame) -> int:
        number = self._frame_numbers.setdefault(frame, len(self.frames))
        if number == len(self.frames):
            self.frames.append(frame)
        return number


@dataclass(frozen=True, slots=True)
class Stacks:
    """All stacks of a snapshot, each as numbers into `frames`, the innermost frame first."""

    frames: Sequence[SnapshotFrame] = ()
    stacks: Sequence[tuple[int, ...]] = ()

    def of(self, number: int) -> Iterator[SnapshotFrame]:
        """Yield the frames of a stack, none for NO_STACK."""
        if number != NO_STACK:
            yield from (self.frames[frame] for frame in self.stacks[number])


@dataclass(slots=True)
class EventStacks:
    """For each event of one device: its stack, time, and what was written on it.

    `numbers` are those of stacks, `times` microseconds. `metadata` and `regions` are numbers of
    texts: of torch.cuda.memory._set_memory_metadata, and of the compiled region.
    """

    numbers: array[int] = field(default_factory=lambda: array("i"))
    times: array[int] = field(default_factory=lambda: array("q"))
    metadata: array[int] = field(default_factory=lambda: array("i"))
    regions: array[int] = field(default_factory=lambda: array("i"))

    def arrays(self) -> tuple[array[int], ...]:
        """Return the arrays with one element per event."""
        return self.numbers, self.times, self.metadata, self.regions


def _text(value: object) -> str:
    if type(value) is not str:
        raise damaged("a frame has no file or no name")
    return _shortened(value)


def _shortened(value: str) -> str:
    return value if len(value) <= MAX_TEXT else "…" + value[1 - MAX_TEXT :]


def _line(value: object) -> int:
    return value if type(value) is int and 0 < value < LIMIT else 0
