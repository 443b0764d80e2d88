"""`Session.on_pressure`: functions of the script that free memory when it is short."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchmem.allocator.sizes import format_size
from torchmem.sdk._errors import log
from torchmem.sdk._interruptions import is_interruption

# A hook that takes longer is dropped: all ranks of the job wait for this one.
MAX_HOOK_SECONDS = 5.0
# A hook is dropped after this many calls in a row that freed nothing, or less than half of what it
# said.
MAX_EMPTY_CALLS = 3

PressureCallback = Callable[[int], Any]


@dataclass(order=True)
class PressureHook:
    """A registered function; `remove` ends it. Hooks are sorted by priority, then by age."""

    priority: float
    number: int
    callback: PressureCallback = field(compare=False)
    registry: PressureHooks = field(compare=False, repr=False)
    empty_calls: int = field(default=0, compare=False)

    def remove(self) -> None:
        """Do not call the function any more. Calling this again has no effect."""
        self.registry.discard(self)


class PressureHooks:
    """The hooks of one process, called in the training thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._hooks: list[PressureHook] = []
        self._numbers = itertools.count()
        self.is_running = False

    @property
    def exist(self) -> bool:
        """Whether any hook is registered."""
        return bool(self._hooks)

    def add(self, callback: PressureCallback, priority: float) -> PressureHook:
        """Register a function."""
        hook = PressureHook(float(priority), next(self._numbers), callback, self)
        self._hooks = sorted([*self._hooks, hook])
        return hook

    def discard(self, hook: PressureHook) -> None:
        """Remove a hook, if it is there."""
        self._hooks = [other for other in self._hooks if other is not hook]

    def call(self, wanted: int, allocated: Callable[[], int]) -> int:
        """Call hooks, lowest priority first, until `wanted` bytes are free; return the bytes.

        The bytes are the decrease of `allocated`, the allocated bytes of all devices. Not
        reentrant: a hook that runs out of memory calls no hooks.
        """
        if self.is_running:
            return 0
        self.is_running = True
        try:
            freed = 0
            for hook in tuple(self._hooks):
                if freed >= wanted:
                    break
                freed += self._call(hook, wanted - freed, allocated)
            return freed
        finally:
            self.is_running = False

    def _call(self, hook: PressureHook, wanted: int, allocated: Callable[[], int]) -> int:
        before, started = allocated(), self._clock()
        try:
            said = hook.callback(wanted)
        except Exception as error:
            if is_interruption(error):
                raise
            self._drop(hook, f"it raised {type(error).__name__}: {error}")
            return 0
        seconds, freed = self._clock() - started, before - allocated()
        if seconds > MAX_HOOK_SECONDS:
            self._drop(hook, f"it took {seconds:.1f} s, more than {MAX_HOOK_SECONDS:g} s")
        else:
            self._check(hook, said, freed)
        return max(0, freed)

    def _check(self, hook: PressureHook, said: object, freed: int) -> None:
        claimed = int(said) if isinstance(said, (int, float)) else 0
        if freed > 0 and 2 * freed >= claimed:
            hook.empty_calls = 0
            return
        hook.empty_calls += 1
        if hook.empty_calls >= MAX_EMPTY_CALLS:
            told = f", although it returned {format_size(claimed)}" if claimed > 0 else ""
            self._drop(
                hook,
                f"it freed {format_size(max(0, freed))} in the last of {MAX_EMPTY_CALLS} "
                f"calls{told}",
            )

    def _drop(self, hook: PressureHook, reason: str) -> None:
        self.discard(hook)
        name = getattr(hook.callback, "__qualname__", type(hook.callback).__name__)
        log(logging.WARNING, "torchmem no longer calls the pressure hook %s: %s", name, reason)
