"""Notes during a run what its memory is for, so that the trace can be divided afterwards.

A mark is a position in the allocator's own trace: the number of allocations and of requested
frees so far, which PyTorch counts. Only addresses, sizes and names are kept, and no tensor and no
module, so that nothing of the script lives longer than without.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any
from weakref import ref

from torchmem.allocator.backend import Backend, Modules, Storages
from torchmem.allocator.snapshot import FrameInfo
from torchmem.compare.peak_memory import Use
from torchmem.preflight.child.uses import (
    Owner,
    Owners,
    SourceLines,
    Trace,
    TraceMark,
    TracePeak,
    trace_peak,
    uses_left,
)
from torchmem.preflight.result import Phase
from torchmem.sdk.oom.module_names import ModuleNames

MAX_MARKS = 20_000
"""Later steps are not divided; no test and no preflight has so many."""

WORKSPACES: Owner = ("workspaces", None)
"""The owner of cuBLAS's workspaces, which live from its first call on."""
MAX_LOOKS = 8
"""Looks for the parameters of the same modules, which may be moved to the GPU in between."""
_OWN = ("torchmem.preflight.", "torchmem.pytest_plugin.")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class TraceMarks:
    """The marks of one process, noted through PyTorch's hooks in the script's threads."""

    def __init__(self, backend: Backend, clear_workspaces: Callable[[], None]) -> None:
        """`clear_workspaces`: frees what PyTorch keeps for cuBLAS, which shows what it is."""
        self.noted: list[TraceMark] = []
        self._backend = backend
        self._clear_workspaces = clear_workspaces
        self._counter = backend.tensor_counter()
        self._names: list[ModuleNames] = []
        self._version: int | None = None
        self._looks = 0
        self._modules: list[tuple[str | None, ref[Any]]] = []
        self._start: Mapping[int, int] = {}
        self._after_backward: Mapping[int, int] | None = None
        self._parameters: dict[int, str | None] = {}

    def phase_begins(self, phase: Phase) -> None:
        """Note the phase that begins, and the stack if it is a backward pass."""
        positions = self.positions()
        if phase == "backward" and self._after_backward is not None:
            # The pass before it was not followed by an optimizer: another step began there.
            self._add(TraceMark(self._after_backward, begins_step=True))
        self._after_backward = None
        frames = _stack() if phase == "backward" else ()
        owners = self._gradients() if phase == "optimizer" else self._model()
        self._add(TraceMark(positions, phase, frames=frames, owners=owners))

    def backward_ended(self) -> None:
        """Note the gradients after an outermost backward pass."""
        self._after_backward = self.positions()
        self._add(TraceMark(self._after_backward, owners=self._gradients()))

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Note the state of an optimizer after its step."""
        self._add(TraceMark(self.positions(), owners=self._states(optimizer)))

    def step_ended(self) -> None:
        """Note that another step begins."""
        self._after_backward = None
        self._add(TraceMark(self.positions(), begins_step=True))

    def note_tensors(self) -> None:
        """Note which parameters and gradients exist now, before a snapshot is taken."""
        self._looks = 0
        owners = _joined(self._model(), self._gradients())
        self._add(TraceMark(self.positions(), owners=owners, frees=WORKSPACES))
        if self._backend.is_initialized():
            self._clear_workspaces()
        self._add(TraceMark(self.positions()), is_last=True)

    def began(self) -> None:
        """Note where the trace begins; without this call, it is CUDA's initialization."""
        self._start = self.positions()

    def peak(
        self, snapshot: Mapping[str, Any], device: int, lines: SourceLines, since: int = 0
    ) -> TracePeak | None:
        """Return the peak of a device since a position.

        The snapshot with the trace was taken after `note_tensors`.
        """
        trace = self._trace(snapshot, device, since)
        return trace_peak(trace, device, self.module_of, lines) if trace else None

    def left(
        self, snapshot: Mapping[str, Any], device: int, lines: SourceLines, since: int
    ) -> tuple[Use, ...]:
        """Return what was allocated since a position and was not freed, as `peak` does."""
        trace = self._trace(snapshot, device, since)
        return uses_left(trace, device, self.module_of, lines) if trace else ()

    def _trace(self, snapshot: Mapping[str, Any], device: int, since: int) -> Trace | None:
        traces = snapshot["device_traces"]
        if device >= len(traces) or not self.noted:
            return None
        start, end = (each.get(device, 0) for each in (self._start, self.noted[-1].positions))
        return Trace(traces[device], self.noted, start, end, max(since, start))

    def module_of(self, frames: Sequence[FrameInfo]) -> str | None:
        """Return the module whose `forward` a stack runs; None if that is unknown."""
        found = (names.of(frames) for names in reversed(self._names))
        return next((name for name in found if name is not None), None)

    def _add(self, mark: TraceMark, *, is_last: bool = False) -> None:
        if len(self.noted) < MAX_MARKS or is_last:
            self.noted.append(mark)

    def positions(self) -> Mapping[int, int]:
        """Return the `position` of each device with a context."""
        if not self._backend.is_initialized():
            return {}
        stats = {
            device.index: self._backend.memory_stats(device.index)
            for device in self._backend.devices()
        }
        return {device: position(values) for device, values in stats.items() if values}

    def _model(self) -> Owners:
        """Return parameters and buffers. Note the modules' names if there are new ones."""
        modules = self._backend.modules()
        found: dict[int, dict[int, Owner]] = {}
        if modules is None or not self._backend.is_initialized():
            return found
        self._looks = self._looks + 1 if modules.version == self._version else 0
        if self._looks > MAX_LOOKS:
            return found
        for name, module in self._named(modules):
            parameters = modules.parameters(module)
            self._parameters |= dict.fromkeys(map(id, parameters), name)
            self._own(found, parameters, "parameters", name)
            buffers = module.__dict__.get("_buffers") or {}
            self._own(found, buffers.values(), "buffers", name)
        return found

    def _named(self, modules: Modules) -> Iterator[tuple[str | None, Any]]:
        """Yield the modules with their paths, and note the names when there are new ones."""
        if modules.version != self._version:
            self._version = modules.version
            # By this clock it is always 0.0: names that come late would be missing in the result.
            names = ModuleNames(modules, clock=float)
            names.forget_modules()
            self._names.append(names)
            self._modules = [(name, ref(module)) for name, module in _named_modules(modules)]
        for name, reference in self._modules:
            module = reference()
            if module is not None:
                yield name, module

    def _gradients(self) -> Owners:
        modules = self._backend.modules()
        found: dict[int, dict[int, Owner]] = {}
        if modules is None or self._counter is None or not self._backend.is_initialized():
            return found
        for name, module in self._named(modules):
            storages: Storages = {}
            self._counter.count_gradients(modules.parameters(module), storages)
            _add(found, storages, ("gradients", name))
        return found

    def _states(self, optimizer: Any) -> Owners:
        found: dict[int, dict[int, Owner]] = {}
        for parameter, state in dict(getattr(optimizer, "state", {})).items():
            self._own(found, [state], "optimizer_state", self._parameters.get(id(parameter)))
        return found

    def _own(
        self,
        found: dict[int, dict[int, Owner]],
        values: Iterable[Any],
        component: str,
        name: str | None,
    ) -> None:
        storages: Storages = {}
        if self._counter is not None:
            self._counter.count(values, storages)
        _add(found, storages, (component, name))


def position(stats: Mapping[str, Any]) -> int:
    """Return the number of allocations and requested frees in nested statistics.

    PyTorch counts both when it records them (`malloc` and `free` in CUDACachingAllocator.cpp, 2.4
    to 2.13).
    """
    counts = stats["allocation"]["all"]
    return int(counts["allocated"]) + int(counts["freed"])


def _named_modules(modules: Modules) -> Iterator[tuple[str | None, Any]]:
    """Yield each module once, with its path below an outermost module."""
    known = {id(module): module for root in modules.roots() if (module := root()) is not None}
    inner = {
        id(member)
        for module in known.values()
        for _, reference in modules.named_submodules(module)
        if (member := reference()) is not None
    }
    left = [("", module) for key, module in known.items() if key not in inner]
    seen: set[int] = set()
    while left:
        name, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield _NUMBER.sub("*", name) or None, module
        for own, reference in modules.named_submodules(module):
            if (member := reference()) is not None:
                left.append((f"{name}.{own}".lstrip("."), member))


def _add(found: dict[int, dict[int, Owner]], storages: Storages, owner: Owner) -> None:
    for device, addresses in storages.items():
        found.setdefault(device, {}).update(dict.fromkeys(addresses, owner))


def _joined(first: Owners, second: Owners) -> Owners:
    return {
        device: {**first.get(device, {}), **second.get(device, {})} for device in {*first, *second}
    }


def _stack() -> list[FrameInfo]:
    """Return the Python stack outside of this package, innermost first."""
    frames: list[FrameInfo] = []
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - what inspect.currentframe calls
    while frame is not None:
        if frames or not frame.f_globals.get("__name__", "").startswith(_OWN):
            code, line = frame.f_code, frame.f_lineno or 0
            frames.append({"filename": code.co_filename, "line": line, "name": code.co_name})
        frame = frame.f_back
    return frames
