"""The Python stacks of a snapshot: the stack and the time of each allocation.

Equal stacks and frames are kept once. The worker collects them, and the reader receives them as
flat arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchmem.trace.content import ACTIONS, LIMIT, damaged

MAX_FRAMES = 64
"""The number of a stack's innermost frames that are kept."""
MAX_TEXT = 300
NO_STACK = -1
UNKNOWN_TIME = -1
_WITH_STACK = {"alloc", "oom"}


@dataclass(frozen=True, slots=True)
class SnapshotFrame:
    """One frame as PyTorch records it, innermost first in a stack; `line` is 0 if unknown."""

    file: str
    line: int
    function: str


class StackTable:
    """Numbers frames and stacks in the order in which they first occur."""

    def __init__(self) -> None:
        self.frames: list[SnapshotFrame] = []
        self.members = array("i")
        self.lengths = array("i")
        self._frame_numbers: dict[SnapshotFrame, int] = {}
        self._frames_by_id: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._stacks_by_id: dict[int, int] = {}

    def number(self, frames: object) -> int:
        """Return the number of a stack; NO_STACK if none was recorded.

        Objects that were seen are recognized by their identity, so they must stay alive.

        Raises:
            InvalidSnapshotError: the stack does not have the form that PyTorch writes.
        """
        if not frames:
            return NO_STACK
        known = self._stacks_by_id.get(id(frames))
        if known is None:
            known = self._stacks_by_id[id(frames)] = self._stack(frames)
        return known

    def _stack(self, frames: object) -> int:
        if type(frames) is not list:
            raise damaged("a stack is not a list")
        numbers = self._frames_by_id
        stack = tuple(
            [
                numbers[id(frame)] if id(frame) in numbers else self._frame(frame)
                for frame in frames[:MAX_FRAMES]
            ]
        )
        number = self._stacks.setdefault(stack, len(self._stacks))
        if number == len(self.lengths):
            self.members.extend(stack)
            self.lengths.append(len(stack))
        return number

    def _frame(self, value: object) -> int:
        if type(value) is not dict:
            raise damaged("a frame is not a dict")
        frame = SnapshotFrame(
            _text(value.get("filename")), _line(value.get("line")), _text(value.get("name"))
        )
        number = self._frame_numbers.setdefault(frame, len(self.frames))
        if number == len(self.frames):
            self.frames.append(frame)
        self._frames_by_id[id(value)] = number
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
    """For each event of one device: the number of its stack, and its time in microseconds."""

    numbers: array[int] = field(default_factory=lambda: array("i"))
    times: array[int] = field(default_factory=lambda: array("q"))

    def arrays(self) -> tuple[array[int], ...]:
        """Return the arrays with one element per event."""
        return self.numbers, self.times


def event_stacks(trace: Iterable[Mapping[str, Any]], table: StackTable) -> EventStacks:
    """Return the stacks of the events that `content.check_trace` keeps, in the same order.

    `time_us` (since 2.3) counts from an arbitrary moment. Stacks of frees are left out: they show
    where memory was freed, not what it was for.
    """
    result = EventStacks()
    for entry in trace:
        action = entry.get("action")
        if action not in ACTIONS:
            continue
        time = entry.get("time_us", UNKNOWN_TIME)
        if type(time) is not int or not UNKNOWN_TIME <= time < LIMIT:
            raise damaged("an event has an invalid time_us")
        has_stack = action in _WITH_STACK
        result.numbers.append(table.number(entry.get("frames")) if has_stack else NO_STACK)
        result.times.append(time)
    return result


def block_stacks(segments: Iterable[Mapping[str, Any]], table: StackTable) -> dict[int, int]:
    """Return the stack of each block in use that has one, by address.

    Devices share addresses only in damaged files, so that one of the blocks gets the other's stack.
    """
    found = {}
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                number = table.number(block.get("frames"))
                if number != NO_STACK:
                    found[address] = number
            address += block["size"]
    return found


def _text(value: object) -> str:
    if type(value) is not str:
        raise damaged("a frame has no file or no name")
    return value if len(value) <= MAX_TEXT else "…" + value[1 - MAX_TEXT :]


def _line(value: object) -> int:
    return value if type(value) is int and 0 < value < LIMIT else 0
