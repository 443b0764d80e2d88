"""The entries of a trace before one moment: what the allocator was doing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchmem.trace.events import ACTIONS, FREE_COMPLETED, FREE_REQUESTED
from torchmem.trace.holders import LineFinder
from torchmem.trace.lifetimes import Lifetimes
from torchmem.trace.stacks import NO_STACK

FREE = "free"
"""free_requested and free_completed of one block, directly after each other."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the trace.

    `event` is its number, `seconds` the time from it to the moment, None if unknown. `line` is that
    of the allocation, also of a block that is freed; "" if unknown. `stream` is 0 for the default
    stream.
    """

    event: int
    action: str
    size_bytes: int
    seconds: float | None
    line: str
    stream: int


def last_entries(lifetimes: Lifetimes, moment: int, count: int) -> tuple[Entry, ...]:
    """Return the last entries before a moment, the oldest first."""
    numbers = _shown(lifetimes, moment, count)
    lines, stacks = LineFinder(lifetimes), _stacks(lifetimes, numbers)
    columns, now = lifetimes.trace.columns, lifetimes.time(moment)
    found = []
    for event, action in reversed(numbers):
        then, stack = lifetimes.time(event + 1), stacks.get(event, NO_STACK)
        found.append(
            Entry(
                event,
                action,
                columns.sizes[event],
                None if now is None or then is None else (now - then) / 1e6,
                "" if stack == NO_STACK else lines.line(stack).text,
                columns.streams[event],
            )
        )
    return tuple(found)


def _shown(lifetimes: Lifetimes, moment: int, count: int) -> list[tuple[int, str]]:
    """Return numbers and actions, the newest first."""
    found: list[tuple[int, str]] = []
    for event, action in _backwards(lifetimes, moment):
        if len(found) == count:
            break
        if action != "snapshot":
            found.append((event, action))
    return found


def _backwards(lifetimes: Lifetimes, moment: int) -> Iterator[tuple[int, str]]:
    codes, addresses = lifetimes.trace.columns.codes, lifetimes.trace.columns.addresses
    event = moment - 1
    while event >= 0:
        before = event - 1
        is_pair = before >= 0 and (codes[before], codes[event]) == (FREE_REQUESTED, FREE_COMPLETED)
        if is_pair and addresses[before] == addresses[event]:
            yield event, FREE
            event -= 2
        else:
            yield event, ACTIONS[codes[event]]
            event -= 1


def _stacks(lifetimes: Lifetimes, numbers: list[tuple[int, str]]) -> dict[int, int]:
    """Return the stack of the allocation that each entry begins or ends."""
    found = {event: lifetimes.trace.events.numbers[event] for event, _ in numbers}
    shown = {event - (action == FREE): event for event, action in numbers}
    for number, end in enumerate(lifetimes.ends):
        if end in shown:
            found[shown[end]] = lifetimes.stacks[number]
    return found
