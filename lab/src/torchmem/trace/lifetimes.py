"""When each allocation of a snapshot was in use, and the moments to look at: end, peak, and OOM.

Sizes are requested bytes, as `torch.cuda.memory_stats()["requested_bytes"]` counts them. An
allocation ends when the program frees it (`free_requested`), although its memory may wait for
another stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, get_args

from torchmem.trace import StackedTrace
from torchmem.trace.events import ACTIONS
from torchmem.trace.stacks import NO_STACK, UNKNOWN_TIME

At = Literal["end", "peak", "oom"]
MOMENTS: tuple[At, ...] = get_args(At)
BEFORE = -1
"""The start of an allocation that was in use when the recording began."""

_ALLOC, _OOM = ACTIONS.index("alloc"), ACTIONS.index("oom")
_FREE_REQUESTED, _FREE_COMPLETED = (
    ACTIONS.index("free_requested"),
    ACTIONS.index("free_completed"),
)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Allocations of one device, one element of each array per allocation.

    `starts` and `ends` are numbers of events; an allocation without an end has the number of
    events. `addresses` are the addresses of the blocks.
    """

    trace: StackedTrace
    addresses: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    stacks: array[int] = field(default_factory=lambda: array("i"))
    starts: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def of(cls, trace: StackedTrace) -> Lifetimes:
        """Pair the allocations of a trace with their frees and with the blocks at its end."""
        lifetimes = cls(trace)
        lifetimes._add_blocks(lifetimes._pair())
        return lifetimes

    @property
    def events(self) -> int:
        """Number of events."""
        return len(self.trace.columns.codes)

    def in_use(self, moment: int) -> Iterator[int]:
        """Yield the allocations in use before the event number `moment`."""
        for number, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            if start < moment <= end:
                yield number

    def totals(self) -> list[int]:
        """Return the bytes in use before each event, and after the last one."""
        changes = [0] * (self.events + 2)
        for size, start, end in zip(self.sizes, self.starts, self.ends, strict=True):
            changes[start + 1] += size
            changes[end + 1] -= size
        return list(accumulate(changes[:-1]))

    def moment(self, at: At) -> int | None:
        """Return the number of the event that follows the moment; None without an OOM."""
        if at == "end":
            return self.events
        if at == "peak":
            totals = self.totals()
            return totals.index(max(totals))
        return next(
            (event for event in reversed(range(self.events)) if self._code(event) == _OOM), None
        )

    def time(self, moment: int) -> int | None:
        """Return the time of the last event before the moment, in microseconds."""
        times = self.trace.events.times
        return times[moment - 1] if moment and times[moment - 1] != UNKNOWN_TIME else None

    def age(self, number: int, moment: int) -> float | None:
        """Return the seconds for which an allocation has been in use; None if unknown."""
        start, now = self.starts[number], self.time(moment)
        if start == BEFORE or now is None:
            return None
        began = self.trace.events.times[start]
        return None if began == UNKNOWN_TIME else (now - began) / 1e6

    def _code(self, event: int) -> int:
        return self.trace.columns.codes[event]

    def _pair(self) -> dict[int, int]:
        """Add every allocation of the trace; return those that were not freed, by address."""
        columns = self.trace.columns
        live: dict[int, int] = {}
        # Recorded with skip_actions, a trace may have only the completions.
        has_requests = _FREE_REQUESTED in columns.codes
        free = _FREE_REQUESTED if has_requests else _FREE_COMPLETED
        for event, (code, address) in enumerate(zip(columns.codes, columns.addresses, strict=True)):
            if code == _ALLOC:
                stack = self.trace.events.numbers[event]
                live[address] = self._add(address, columns.sizes[event], stack, event)
            elif code == free:
                number = live.pop(address, None)
                if number is None:
                    number = self._add(address, columns.sizes[event], NO_STACK, BEFORE)
                self.ends[number] = event
        return live

    def _add_blocks(self, live: dict[int, int]) -> None:
        """Add the blocks that were in use before the trace began and still are."""
        for segment in self.trace.segments:
            for block in segment.blocks:
                if block.state != "active_allocated":
                    continue
                stack = self.trace.blocks.get(block.address, NO_STACK)
                number = live.pop(block.address, None)
                if number is None:
                    size = block.size if block.requested_size is None else block.requested_size
                    self._add(block.address, size, stack, BEFORE)
                elif self.stacks[number] == NO_STACK:
                    self.stacks[number] = stack

    def _add(self, address: int, size: int, stack: int, start: int) -> int:
        self.addresses.append(address)
        self.sizes.append(size)
        self.stacks.append(stack)
        self.starts.append(start)
        self.ends.append(self.events)
        return len(self.sizes) - 1
