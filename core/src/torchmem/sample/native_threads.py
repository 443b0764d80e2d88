"""Threads, locks and sleep of the interpreter, also where gevent or eventlet has replaced them.

Their patches turn `threading.Thread`, `threading.Lock` and `time.sleep` into ones that run other
greenlets while they wait. PyTorch calls the SDK inside the script's calls: when CUDA starts, inside
`Module.cuda()`, where gradients are off for the thread. All greenlets share that thread, so another
one that ran there would train without gradients. It gets an exception, or the process ends by
signal 11. Therefore nothing here runs another greenlet, whenever the process is patched.
tests/allocator_tier/test_greenlets.py shows what happens with `threading`.

A built-in module that is loaded again has functions that no patch has changed. Threads are started
without `threading`, whose `Thread.start` waits for the thread, and which does not list them. All of
them are daemons.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast


def unpatched(name: str) -> ModuleType:
    """Return a new copy of a module of the standard library that is written in C."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_thread = unpatched("_thread")


class Lock:
    """A lock. `owner` is the `ident` of the thread that holds it, if that thread has set it.

    Its functions are the interpreter's, so that no signal handler interrupts them.
    """

    __slots__ = ("acquire", "locked", "owner", "release")

    def __init__(self, *, reentrant: bool = False) -> None:
        native = _thread.RLock() if reentrant else _thread.allocate_lock()
        self.acquire: Callable[..., bool] = native.acquire
        self.release: Callable[[], None] = native.release
        if not reentrant:
            self.locked: Callable[[], bool] = native.locked
        self.owner: int | None = None


def ident() -> int:
    """Return the identifier of the calling thread; all greenlets of a thread have the same."""
    return cast("int", _thread.get_ident())


def is_main_thread() -> bool:
    """Return whether this is the main thread, in any greenlet; by its identifier in Linux."""
    return cast("int", _thread.get_native_id()) == os.getpid()


def sleep(seconds: float) -> None:
    """Wait in this thread."""
    lock = Lock()
    lock.acquire()
    lock.acquire(timeout=seconds)


class Thread:
    """A daemon thread that calls `run`. Top, perf and gdb show its `name`, up to 15 bytes of it."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._run = run
        self._name = name
        self._running = Lock()
        self._idents: list[int] = []

    def start(self) -> None:
        """Start the thread without waiting for it, also after an interrupted start.

        Has no effect on a thread that was started. Raises RuntimeError if the system has no room
        for another thread.
        """
        if not self._idents:
            self._running.acquire(blocking=False)
            # One call, so that no interruption comes between the start and the note of it.
            self._idents += map(_thread.start_new_thread, (self._main,), ((),))

    def is_alive(self) -> bool:
        """Return whether the thread was started and has not ended."""
        return bool(self._idents) and self._running.locked()

    def is_current(self) -> bool:
        """Return whether this thread calls."""
        return ident() in self._idents

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the end of the thread."""
        if self.is_alive() and self._running.acquire(timeout=timeout):
            self._running.release()

    def _main(self) -> None:
        try:
            with contextlib.suppress(OSError):
                Path("/proc/thread-self/comm").write_text(self._name[:15])
            self._run()
        finally:
            self._running.release()
