"""Bytes of the parameters of modules, in a process where no optimizer steps, such as inference.

They are counted in slices. Between two reads only weak references are kept.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import ref

from torchmem.allocator.backend import Modules, Storages, TensorCounter
from torchmem.sdk.components.optimizers import MAX_MEMBERS, Bytes
from torchmem.sdk.components.tracked import Clock
from torchmem.sdk.pytorch.seen_modules import MAX_MODULES
from torchmem.sdk.safety.cost import (
    CHANGE_BUDGET,
    COMPONENT_BUDGET,
    COUNT_SHARE,
    MAX_SLICE_SECONDS,
    MODULES_AFTER_SECONDS,
    RECOUNT_SECONDS,
)

MAX_PARAMETERS = 1 << 11
"""Of one module, which is counted at once."""
SAMPLE_RATIO = 4
"""The addresses of the parameters of the 1st, 4th, 16th, … module are compared at each read."""


class Watch:
    """Shows whether modules were added or removed since it began, or parameters replaced."""

    def __init__(self, modules: Modules, counter: TensorCounter) -> None:
        self._modules = modules
        self._counter = counter
        self._version = modules.version
        self._refs: list[ref[Any]] = []
        self._gone: deque[ref[Any]] = deque(maxlen=1)
        self._samples: list[tuple[ref[Any], Storages]] = []

    def add(self, module: Any) -> None:
        """Watch a module with parameters."""
        # Called without a Python frame, wherever the script drops the module.
        self._refs.append(ref(module, self._gone.append))
        if len(self._refs) >= SAMPLE_RATIO ** len(self._samples):
            self._samples.append((ref(module), self._storages(module)))

    def _storages(self, module: Any) -> Storages:
        found: Storages = {}
        self._counter.count(self._modules.parameters(module), found)
        return found

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has changed, as far as the sample shows."""
        if self._gone or self._version != self._modules.version:
            return False
        return all(
            (module := sampled()) is not None and self._storages(module) == storages
            for sampled, storages in self._samples
        )


class ModuleCount:
    """One count of the parameters of all modules, in slices."""

    def __init__(self, modules: Modules, counter: TensorCounter, clock: Clock) -> None:
        self.seconds = 0.0
        self.watch = Watch(modules, counter)
        self.is_too_large = False
        self._modules = modules
        self._counter = counter
        self._clock = clock
        self._left = modules.roots()
        self._seen: set[int] = set()
        self._found: Storages = {}
        self._members = 0

    def advance(self, seconds: float) -> bool:
        """Count for about this long, at least one module; return whether the count has ended."""
        started = self._clock()
        has_ended = is_over = False
        while not has_ended and not is_over:
            module = self._left.pop()() if self._left else None
            if module is not None and id(module) not in self._seen:
                self._seen.add(id(module))
                self._add(module)
            has_ended = not self._left or self.is_too_large
            is_over = self._clock() >= started + seconds
        self.seconds += self._clock() - started
        return has_ended

    def _add(self, module: Any) -> None:
        self._left += self._modules.submodules(module)
        parameters = self._modules.parameters(module)
        self._members += len(parameters)
        self.is_too_large = (
            len(parameters) > MAX_PARAMETERS
            or self._members > MAX_MEMBERS
            or len(self._seen) > MAX_MODULES
        )
        if parameters and not self.is_too_large:
            self._counter.count(parameters, self._found)
            self.watch.add(module)

    def bytes(self) -> Bytes:
        """Return the bytes by device."""
        return {device: sum(sizes.values()) for device, sizes in self._found.items()}


class ModuleParameters:
    """The newest count; `read` is called with each read of the statistics."""

    def __init__(self, modules: Modules, counter: TensorCounter, clock: Clock) -> None:
        self._modules = modules
        self._counter = counter
        self._clock = clock
        self._count: ModuleCount | None = None
        self._watch: Watch | None = None
        self._bytes: Bytes = {}
        self._due: float | None = None
        self._spent = 0.0
        self._slice_ended = 0.0
        self._is_too_large = False

    def read(self, now: float, *, may_count: bool) -> Bytes | None:
        """Return the bytes by device; None while they are unknown, or if there are none.

        `now` is a time of the clock. `may_count`: whether there is time to count.
        """
        if self._due is None:
            self._due = now + MODULES_AFTER_SECONDS
        if self._watch and not self._watch.is_unchanged:
            self._watch, self._bytes = None, {}
            self._due = now + self._spent / CHANGE_BUDGET
        if may_count and not self._is_too_large and now >= self._due:
            self._advance(now)
        return self._bytes or None

    def _advance(self, now: float) -> None:
        if self._count is None:
            self._count = ModuleCount(self._modules, self._counter, self._clock)
        share = COUNT_SHARE * (now - self._slice_ended)
        has_ended = self._count.advance(min(MAX_SLICE_SECONDS, share))
        self._slice_ended = now
        if has_ended:
            self._end(now, self._count)

    def _end(self, now: float, ended: ModuleCount) -> None:
        """Take the result, unless something has changed since the count began."""
        self._count, self._spent = None, ended.seconds
        self._is_too_large = ended.is_too_large
        if ended.is_too_large or not ended.watch.is_unchanged:
            self._watch, self._bytes = None, {}
            self._due = now + ended.seconds / CHANGE_BUDGET
        else:
            self._watch, self._bytes = ended.watch, ended.bytes()
            self._due = now + max(RECOUNT_SECONDS, ended.seconds / COMPONENT_BUDGET)
