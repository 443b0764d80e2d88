"""The exact peak of one step, from PyTorch's history of it without stacks.

The recording begins at a step's end and ends at that of the next step. Which allocations are
gradients is known from their addresses before and after the backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torchmem.allocator.backend import Backend, Storages, TraceEntry
from torchmem.sdk.safety.cost import (
    MAX_TRACE_ENTRIES,
    MIN_TRACE_ENTRIES,
    REPEATED_TRACE_SECONDS,
    TRACE_BUDGET,
    TRACE_SECONDS,
)

Traces = Sequence[Sequence[TraceEntry]]
Sizes = Mapping[int, int]
"""Bytes by address, or by device."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Requested bytes, and the allocations and frees since the process began, by device."""

    requested: Sizes
    events: Sizes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The moment of the highest requested bytes of a step.

    gradients: bytes of the gradients that existed.
    released: bytes of other blocks from before the step that the step had freed.
    """

    requested: int
    gradients: int
    released: int = 0


class StepTrace:
    """Records a step from time to time, in the training thread; never while the script records."""

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.perf_counter) -> None:
        self.is_recording = False
        self._backend = backend
        self._clock = clock
        self._due = 0.0
        self._spent = 0.0
        self._entries = MIN_TRACE_ENTRIES
        self._before = Counts({})
        self._old: Storages = {}
        self._new: Storages = {}

    def begin(self, before: Counts, gradients: Callable[[Storages], None]) -> None:
        """Start to record at a step's end, if that is due.

        `before`: the counts now. `gradients` adds the storages of existing gradients.
        """
        started = self._clock()
        if started < self._due:
            return
        self._due = started + REPEATED_TRACE_SECONDS
        self.is_recording = self._backend.start_trace(self._entries)
        if self.is_recording:
            self._before, self._old, self._new = before, {}, {}
            gradients(self._old)
            self._spent = self._clock() - started

    def before_optimizer(self, gradients: Callable[[Storages], None]) -> None:
        """Note where the gradients of an optimizer are, before its step."""
        started = self._clock()
        gradients(self._new)
        self._spent += self._clock() - started

    def end(self, after: Counts) -> dict[int, StepPeak]:
        """Stop recording; return the peak of each device on which the whole step was recorded.

        `after`: the counts now.
        """
        started = self._clock()
        self.is_recording = False
        peaks = self._backend.end_trace(partial(self._peaks, after.requested)) or {}
        self._spent += self._clock() - started
        self._fit(after.events)
        return peaks

    def _fit(self, events: Sizes) -> None:
        """Keep more entries from now on if the step had more, with a quarter to spare."""
        before = self._before.events
        most = max(
            (count - before.get(device, count) for device, count in events.items()), default=0
        )
        if most >= self._entries:
            self._entries = min(MAX_TRACE_ENTRIES, most * 5 // 4)

    def wait(self, *, is_known: bool) -> None:
        """Set when the next recording is due: later if an exact peak is known."""
        pause = REPEATED_TRACE_SECONDS if is_known else TRACE_SECONDS
        self._due = self._clock() + max(pause, self._spent / TRACE_BUDGET)

    def cancel_late(self) -> None:
        """Stop recording if the step takes too long, as when the training has ended."""
        if self._clock() > self._due:
            self.cancel()

    def cancel(self) -> None:
        """Stop recording, without a result."""
        if self.is_recording:
            self.is_recording = False
            self._backend.end_trace(lambda _: None)

    def _peaks(self, requested: Sizes, traces: Traces) -> dict[int, StepPeak]:
        peaks = {}
        for device, before in self._before.requested.items():
            entries = traces[device] if device < len(traces) else ()
            old, new = self._old.get(device, {}), self._new.get(device, {})
            net = sum(map(_change, entries))
            if len(entries) < self._entries and before + net == requested.get(device):
                peaks[device] = step_peak(entries, before, old, new)
        return peaks


def step_peak(entries: Sequence[TraceEntry], before: int, old: Sizes, new: Sizes) -> StepPeak:
    """Return the peak of a recorded step that began with `before` requested bytes.

    `old`: gradients at its beginning; `new`: gradients before the optimizer's step. A gradient that
    is not in any entry exists all the time.
    """
    level = highest = before
    place = -1
    for index, entry in enumerate(entries):
        level += _change(entry)
        if level > highest:
            highest, place = level, index
    freed = _freed_from_before(entries[: place + 1])
    made = {entry["addr"]: index for index, entry in enumerate(entries) if entry["action"] == _MADE}
    alive = {address: size for address, size in old.items() if address not in freed}
    alive |= {address: size for address, size in new.items() if made.get(address, -1) <= place}
    released = sum(size for address, size in freed.items() if address not in old)
    return StepPeak(highest, sum(alive.values()), released)


def _freed_from_before(entries: Sequence[TraceEntry]) -> dict[int, int]:
    """Return address and bytes of the blocks that were freed and not allocated in the entries."""
    made, freed = set[int](), dict[int, int]()
    for entry in entries:
        if entry["action"] == _MADE:
            made.add(entry["addr"])
        elif entry["action"] == _FREED and entry["addr"] not in made:
            freed[entry["addr"]] = entry["size"]
    return freed


_MADE, _FREED = "alloc", "free_completed"


def _change(entry: TraceEntry) -> int:
    action = entry["action"]
    return entry["size"] if action == _MADE else -entry["size"] if action == _FREED else 0
