"""`Session.on_pressure`: functions of the script that free memory when it is short."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any

from torchmem.allocator.sizes import GIB, format_size
from torchmem.explain.call_stack import CallStack
from torchmem.sample.sample import HOOK_FAULTS, HookFault
from torchmem.sdk.pytorch.call_stack import thread_stack
from torchmem.sdk.safety.errors import log
from torchmem.sdk.safety.interruptions import is_interruption

# A hook that takes longer is dropped: all ranks of the job wait for this one. What it freed may
# have been copied to the host, into memory that had to be pinned first.
MAX_HOOK_SECONDS = 5.0
MAX_SECONDS_PER_GIB = 2.0
# A hook is dropped after this many calls in a row that freed less than half of what it returned, or
# nothing without returning 0.
MAX_EMPTY_CALLS = 3
MAX_CLAIMED_BYTES = 1 << 60

PressureCallback = Callable[[int], Any]


class PressureHook:
    """A registered function; `remove` ends it."""

    def __init__(
        self, priority: float, callback: PressureCallback, registry: PressureHooks
    ) -> None:
        self.priority = priority
        self.callback = callback
        self.registry = registry
        self.empty_calls = 0

    def remove(self) -> None:
        """Stop calling the function. Calling this again has no effect."""
        self.registry.discard(self)

    @property
    def name(self) -> str:
        """The function's name, for people."""
        return str(getattr(self.callback, "__qualname__", type(self.callback).__name__))


@dataclass(frozen=True, slots=True)
class _Call:
    """A call in progress: its hook, its thread, and when it started, in seconds."""

    hook: PressureHook
    thread: int
    started: float


class PressureHooks:
    """The hooks of one process, called in the training thread and watched by the background thread.

    `dropped` counts the hooks that are no longer called, by what was wrong; it is empty until a
    hook is registered.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        log_later: Callable[..., None] = log,
    ) -> None:
        """`clock` returns monotonic seconds, `log_later` is `Errors.log_later`."""
        self._clock = clock
        self._log_later = log_later
        self._hooks: list[PressureHook] = []
        self._current: _Call | None = None
        self._warned: _Call | None = None
        self.dropped: dict[HookFault, int] = {}
        self.is_running = False

    @property
    def exist(self) -> bool:
        """Whether any hook is registered."""
        return bool(self._hooks)

    def add(self, callback: PressureCallback, priority: float) -> PressureHook:
        """Register a function."""
        hook = PressureHook(float(priority), callback, self)
        self._hooks = sorted([*self._hooks, hook], key=attrgetter("priority"))
        self.dropped = self.dropped or dict.fromkeys(HOOK_FAULTS, 0)
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
                if hook in self._hooks:  # another hook may have removed it
                    freed += self._call(hook, wanted - freed, allocated)
            return freed
        finally:
            self._current, self.is_running = None, False

    def _call(self, hook: PressureHook, wanted: int, allocated: Callable[[], int]) -> int:
        before, started = allocated(), self._clock()
        self._current = _Call(hook, threading.get_ident(), started)
        claimed, failure = self._run(hook, wanted)
        seconds, freed = self._clock() - started, before - allocated()
        if failure is not None:
            self._drop(hook, "raised", f"it raised {failure}")
        elif seconds > (limit := MAX_HOOK_SECONDS + MAX_SECONDS_PER_GIB * max(0, freed) / GIB):
            self._drop(hook, "slow", f"it took {seconds:.1f} s, more than {limit:.3g} s")
        elif claimed != 0 or freed != 0:  # one that returns 0 may have something to spare later
            self._check(hook, claimed or 0, freed)
        return max(0, freed)

    def _run(self, hook: PressureHook, wanted: int) -> tuple[int | None, str | None]:
        """Return the bytes that the hook claims to have freed, and a description of its error.

        The objects that it returns or raises are not kept: they may hold tensors.
        """
        try:
            return _claimed(hook.callback(wanted)), None
        except Exception as error:
            if is_interruption(error):
                raise
            return None, _described(error)

    def _check(self, hook: PressureHook, claimed: int, freed: int) -> None:
        if freed > 0 and 2 * freed >= claimed:
            hook.empty_calls = 0
            return
        hook.empty_calls += 1
        if hook.empty_calls >= MAX_EMPTY_CALLS:
            told = f", although it returned {format_size(claimed)}" if claimed > 0 else ""
            self._drop(
                hook,
                "empty",
                f"it freed {format_size(max(0, freed))} in the last of {MAX_EMPTY_CALLS} "
                f"calls{told}",
            )

    def _drop(self, hook: PressureHook, fault: HookFault, reason: str) -> None:
        self.discard(hook)
        self.dropped[fault] += 1
        text = "torchmem no longer calls the pressure hook %s: %s"
        self._log_later(logging.WARNING, text, hook.name, reason)

    def watch(self) -> None:
        """Warn once about a call that takes too long, while it lasts. For the background thread."""
        call = self._current
        if call is None or call is self._warned:
            return
        seconds = self._clock() - call.started
        if seconds > MAX_HOOK_SECONDS:
            self._warned = call
            log(
                logging.WARNING,
                "the pressure hook %s has run for %.0f s, and the training waits for it%s",
                call.hook.name,
                seconds,
                _place(call.thread),
            )


def _claimed(said: object) -> int | None:
    """Return the bytes that a hook claims to have freed; None unless it is a possible number."""
    if not isinstance(said, (int, float)) or isinstance(said, bool):
        return None
    return int(said) if 0 <= said <= MAX_CLAIMED_BYTES else None


def _described(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:
        if is_interruption(other):
            raise
        return type(error).__name__


def _place(thread: int) -> str:
    """Return where the hook that this thread calls is now, or an empty text."""
    frames = thread_stack(thread).frames
    inside = tuple(takewhile(lambda frame: frame.file != __file__, frames))
    frame = CallStack(inside).line
    return "" if frame is None else f": {frame.place} in {frame.function}"
