"""Exceptions that interrupt the SDK's code without coming from it.

Without this module, a timeout that comes while the SDK's code runs is suppressed with the SDK's own
errors, and the script never ends; a lock of the SDK stays held for good; and a script that calls
itself as deep as Python allows gets a RecursionError that it would not have had.

Python runs the script's signal handlers between two bytecodes of the main thread, even in the
middle of the SDK's code, and a handler may raise: Ctrl-C, or a timeout by SIGALRM. A trace function
may raise anywhere, and `PyThreadState_SetAsyncExc` raises in any thread. All of these belong to the
script and must reach it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from queue import Empty
from types import CodeType, FrameType, TracebackType
from typing import ParamSpec, TypeVar, cast

from torchmem.sample.native_threads import Lock, ident

P = ParamSpec("P")
T = TypeVar("T")

# Instructions that only raise what interrupts them.
_HARMLESS = {"RESUME", "JUMP_BACKWARD", "JUMP_FORWARD", "JUMP_ABSOLUTE"}
_RAISING = {"RAISE_VARARGS", "RERAISE"}
# Packages whose code the SDK calls, and whose errors are therefore the SDK's.
_CALLED = sys.stdlib_module_names | {"torch", "torchmem", "prometheus_client"}
# C code raises these without arguments.
_WITHOUT_ARGUMENTS = (MemoryError, RecursionError, StopIteration, Empty)


def is_interruption(error: BaseException, *, asynchronous: bool = True) -> bool:
    """Return whether `error`, caught in the SDK's code, came from the script.

    It did if its traceback leads through a signal handler or a trace function, which are the only
    functions that are called with the frame they interrupt. An asynchronous exception has no frame
    of its own: no instruction at its place could have raised it, or its class is the script's, or
    it has no arguments. Without `asynchronous`, those are not looked for.
    """
    if not isinstance(error, Exception):
        return True
    entries = list(_entries(error.__traceback__))
    frames = pairwise(entry.tb_frame for entry in entries)
    if any(_is_interrupting(caller, frame) for caller, frame in frames):
        return True
    return asynchronous and bool(entries) and _is_asynchronous(error, entries)


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_interrupting(caller: FrameType, frame: FrameType) -> bool:
    return frame.f_code in _handler_codes() or any(
        isinstance(argument, FrameType) and (argument is caller or argument.f_back is caller)
        for argument in _arguments(frame)
    )


def _arguments(frame: FrameType) -> Iterator[object]:
    values = inspect.getargvalues(frame)
    yield from (values.locals.get(name) for name in values.args)
    if values.varargs:
        yield from values.locals.get(values.varargs) or ()


def _handler_codes() -> set[CodeType]:
    """Return the code of the signal handlers that are installed now."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = (getattr(inspect.unwrap(h), "__code__", None) for h in handlers if callable(h))
    return {code for code in codes if code is not None}


def _is_asynchronous(error: Exception, entries: list[TracebackType]) -> bool:
    if isinstance(error, _WITHOUT_ARGUMENTS):
        return False
    last = entries[-1]
    if last.tb_lasti < 0:  # before the first instruction, in Python 3.10
        return True
    operation = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
    if operation in _HARMLESS:
        return True
    names = [str(entry.tb_frame.f_globals.get("__name__")) for entry in entries]
    if not _is_called(type(error).__module__) and all(map(_is_called, names)):
        return True
    return not error.args and operation not in _RAISING


def _is_called(module: str) -> bool:
    return module.partition(".")[0] in _CALLED


def shield(function: Callable[P, T], otherwise: T | None = None) -> Callable[P, T]:
    """Keep a RecursionError of the SDK's frames out of a script that is close to the limit.

    For functions that the script, PyTorch or the interpreter calls. Only this one frame must fit:
    it handles the error without a call that must succeed, and returns `otherwise`.
    """

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except RecursionError as error:
            try:
                is_raised = is_interruption(error)
            except RecursionError:
                is_raised = False
            if is_raised:
                raise
        return cast("T", otherwise)

    return entry


@contextmanager
def ignore(*kinds: type[Exception]) -> Iterator[None]:
    """Ignore errors of these kinds, as `contextlib.suppress` does, unless they interrupt the code.

    TimeoutError, which many signal handlers raise, is an OSError.
    """
    try:
        yield
    except kinds as error:
        if is_interruption(error):
            raise


def call_if_free(lock: Lock, call: Callable[[], T]) -> T | None:
    """Call holding the lock, or return None at once if the lock is not free."""
    return _hold(lock, 0.0, lambda is_held: call() if is_held else None)


def call_holding(lock: Lock, seconds: float, call: Callable[[], T]) -> T:
    """Call holding the lock, or without it if it is not free within `seconds`.

    It does not wait for this thread itself, which a signal handler or another greenlet interrupts.
    """
    return _hold(lock, 0.0 if lock.owner == ident() else seconds, lambda _: call())


def call_with(lock: Lock, call: Callable[[], T]) -> T:
    """Call holding the lock, however long it takes until it is free.

    `with` would do so too, but since Python 3.14 an interruption between `__enter__` and the block
    leaves the lock held.
    """
    return _hold(lock, math.inf, lambda _: call())


def _hold(lock: Lock, seconds: float, call: Callable[[bool], T]) -> T:
    """Call with whether the lock is held. An interruption never leaves the lock held.

    CPython runs signal handlers at the start of a function, after a call, and before a backward
    jump. So the lock is taken and noted in one call to C, and nothing comes between the call and
    the release. A context manager written in Python could be interrupted at the start of its
    `__exit__`, and a generator would then keep the lock for as long as the script keeps the error.
    """
    held: list[bool] = []
    try:
        timeout = seconds if 0 < seconds < math.inf else -1
        held += map(lock.acquire, (seconds > 0,), (timeout,))
        if held[0]:
            lock.owner = ident()
        return call(held[0])
    finally:
        if held and held[0]:
            lock.owner = None
            lock.release()
