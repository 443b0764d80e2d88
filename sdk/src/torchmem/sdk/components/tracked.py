"""The parts of memory that the script names with `Session.track`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal
from weakref import ref

from torchmem.allocator.backend import Storages, TensorCounter
from torchmem.sample.sample import ASLEEP, COMPONENTS, MAX_TRACKED
from torchmem.sdk.safety.cost import MAX_PART_SECONDS, TRACK_BUDGET
from torchmem.sdk.safety.errors import Errors, log

Clock = Callable[[], float]
"""Seconds, such as `time.perf_counter`."""
Moment = Literal["step", "idle", "oom"]
"""When memory is counted: at a step's end, between steps, or in the observer of an OOM."""

MAX_NAME_BYTES = 64


class TrackedTensors:
    """One part. Keeps no tensor and no module alive, only a callable that it was given.

    `clock` is the CPU time of this thread: while it waits for a core, the count costs nothing.
    """

    def __init__(self, source: Any, counter: TensorCounter, clock: Clock) -> None:
        self.storages: Storages = {}
        self._counter = counter
        self._clock = clock
        self._due = 0.0
        self._costs: deque[float] = deque(maxlen=2)
        self._called: float | None = None
        self._call: Callable[[], object] | None = None
        self._module: ref[Any] | None = None
        self._tensors: list[ref[Any]] = []
        if hasattr(source, "parameters") and hasattr(source, "buffers"):
            self._module = ref(source)
        elif callable(source):
            self._call = source
        else:
            self._tensors = [ref(tensor) for tensor in counter.tensors(source)]

    def count(self, now: float, moment: Moment) -> bool:
        """Count again if a count is due at `now`, in seconds; return whether the part is known.

        The script's callable is only called at a step's end, where the script itself has called the
        SDK. In between, the tensors that it last returned are counted. The part is not known if
        its count costs too much, or its callable was called too long ago.
        """
        is_awaited = moment == "step" and self._is_old(now)
        if self._call and self._called is None and not is_awaited:
            return False
        if is_awaited or now >= self._due or moment == "oom":
            started = self._clock()
            self._count(now, may_call=moment == "step")
            self._costs.append(self._clock() - started)
            is_first = len(self._costs) == 1
            self._due = now + (min(self._pause, MAX_PART_SECONDS) if is_first else self._pause)
        return not self._is_old(now) and self._pause <= MAX_PART_SECONDS

    def _is_old(self, now: float) -> bool:
        """Return whether the callable was not called within the last minute."""
        if self._call is None:
            return False
        return self._called is None or now - self._called > MAX_PART_SECONDS

    @property
    def _pause(self) -> float:
        """Seconds until the next count, based on the cheaper of the two latest counts.

        The garbage collector may have run in the other one.
        """
        return min(self._costs, default=0.0) / TRACK_BUDGET

    def _count(self, now: float, *, may_call: bool) -> None:
        if may_call and self._call:
            self._called = now
            self._tensors = [ref(tensor) for tensor in self._counter.tensors(self._call())]
        found: Storages = {}
        self._counter.count(self._living(), found)
        self.storages = found

    def _living(self) -> Iterable[object]:
        if self._module is None:
            return (tensor for tensor in (known() for known in self._tensors) if tensor is not None)
        module = self._module()
        return () if module is None else (*module.parameters(), *module.buffers())


class Tracked:
    """All parts by name. `version` grows when a part is added, removed, or no longer known.

    `clock`: the CPU time of this thread.
    """

    def __init__(
        self, counter: TensorCounter | None, errors: Errors, clock: Clock = time.thread_time
    ) -> None:
        self.parts: dict[str, TrackedTensors] = {}
        self.version = 0
        self._known: set[str] = set()
        self._counter = counter
        self._clock = clock
        self._errors = errors

    def set(self, name: str, source: Any) -> None:
        """Track a part from now on. It replaces a part with the same name; None ends tracking."""
        problem = self._problem(name)
        if problem:
            log(logging.WARNING, "track(%.80r) is ignored: %s", name, problem)
        elif source is None:
            self.parts.pop(name, None)
        elif self._counter:
            self.parts[name] = TrackedTensors(source, self._counter, self._clock)
        self.version += 1

    def _problem(self, name: str) -> str | None:
        if not isinstance(name, str) or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            return f"a name is a text of 1 to {MAX_NAME_BYTES} bytes"
        if name in {*COMPONENTS, ASLEEP}:
            return "torchmem has a component with this name; choose another one"
        if name not in self.parts and len(self.parts) >= MAX_TRACKED:
            return f"{MAX_TRACKED} parts are tracked already"
        return None

    def storages(self) -> list[Storages]:
        """Return the storages of all known parts from the last count."""
        parts = tuple(self.parts.items())
        return [part.storages for name, part in parts if name in self._known]

    def count(self, now: float, moment: Moment) -> dict[str, Storages]:
        """Return the storages of each known part; a part that fails is left out."""
        counted = {}
        for name, part in tuple(self.parts.items()):
            with self._errors.suppress("components"):
                if part.count(now, moment):
                    counted[name] = part.storages
        if counted.keys() != self._known:
            self._known = set(counted)
            self.version += 1
        return counted
