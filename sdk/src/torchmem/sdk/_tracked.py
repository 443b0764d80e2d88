"""The parts of memory that the script names with `Session.track`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal
from weakref import ref

from torchmem.allocator.backend import Storages, TensorCounter
from torchmem.sample.sample import COMPONENTS, MAX_COMPONENTS
from torchmem.sdk._cost import TRACK_BUDGET
from torchmem.sdk._errors import Errors, log

Clock = Callable[[], float]
"""Seconds, such as `time.perf_counter`."""
Moment = Literal["step", "idle", "oom"]
"""When memory is counted: at a step's end, between steps, or in the observer of an OOM."""

MAX_PARTS = MAX_COMPONENTS - len(COMPONENTS)
MAX_NAME_BYTES = 64


class Part:
    """One part. Keeps no tensor and no module alive, only a callable that it was given."""

    def __init__(self, source: Any, counter: TensorCounter, clock: Clock) -> None:
        self.storages: Storages = {}
        self._counter = counter
        self._clock = clock
        self._due = 0.0
        self._call: Callable[[], object] | None = None
        self._module: ref[Any] | None = None
        self._tensors: list[ref[Any]] = []
        if hasattr(source, "parameters") and hasattr(source, "buffers"):
            self._module = ref(source)
        elif callable(source):
            self._call = source
        else:
            self._tensors = [ref(tensor) for tensor in counter.tensors(source)]

    def count(self, now: float, moment: Moment) -> None:
        """Count again if that is due; `now` is of the clock.

        The script's callable is called at a step's end only, where the script itself has called
        the SDK. In between, the tensors that it returned last are counted.
        """
        if now < self._due and moment != "oom":
            return
        if moment == "step" and self._call:
            self._tensors = [ref(tensor) for tensor in self._counter.tensors(self._call())]
        found: Storages = {}
        self._counter.count(self._living(), found)
        self.storages = found
        self._due = now + (self._clock() - now) / TRACK_BUDGET

    def _living(self) -> Iterable[object]:
        if self._module is None:
            return (tensor for tensor in (known() for known in self._tensors) if tensor is not None)
        module = self._module()
        return () if module is None else (*module.parameters(), *module.buffers())


class Tracked:
    """All parts by name. `version` grows when a part is added or removed."""

    def __init__(self, counter: TensorCounter | None, errors: Errors, clock: Clock) -> None:
        self.parts: dict[str, Part] = {}
        self.version = 0
        self._counter = counter
        self._clock = clock
        self._errors = errors

    def set(self, name: str, source: Any) -> None:
        """Track a part from now on, in place of the one with that name; None ends it."""
        problem = self._problem(name)
        if problem:
            log(logging.WARNING, "track(%.80r) is ignored: %s", name, problem)
        elif source is None:
            self.parts.pop(name, None)
        elif self._counter:
            self.parts[name] = Part(source, self._counter, self._clock)
        self.version += 1

    def _problem(self, name: str) -> str | None:
        if not isinstance(name, str) or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            return f"a name is a text of 1 to {MAX_NAME_BYTES} bytes"
        if name in COMPONENTS:
            return "this name is a component of torchmem's own; choose another one"
        if name not in self.parts and len(self.parts) >= MAX_PARTS:
            return f"{MAX_PARTS} parts are tracked already"
        return None

    def storages(self) -> list[Storages]:
        """Return the storages of all parts as they were counted last."""
        return [part.storages for part in tuple(self.parts.values())]

    def count(self, now: float, moment: Moment) -> dict[str, Storages]:
        """Return the storages of each part; a part that fails is left out."""
        counted = {}
        for name, part in tuple(self.parts.items()):
            with self._errors.suppress("components"):
                part.count(now, moment)
                counted[name] = part.storages
        return counted
