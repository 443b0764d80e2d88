"""Reading the allocator from the background thread without making any other thread wait.

Without this module, a driver call that hangs stops every Python thread, also those that would end
the process or its collectives.

A read takes the allocator's mutex while it holds the GIL. A thread inside cudaMalloc holds the same
mutex, possibly forever if the driver hangs, and then every Python thread would wait. The
background thread therefore never reads: it asks the main thread, which reads between two bytecodes,
as Python runs signal handlers, and so never while it is inside the driver.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType

from torchmem.sample.native_threads import Lock, sleep
from torchmem.sdk.safety.interruptions import shield

# A main thread that answers later came out of a long call, such as a backward pass. It would see
# the state after that call and not a random one.
MAX_DELAY_SECONDS = 0.005
# How long a request waits for a punctual answer, and its longest pause between two attempts.
WAIT_SECONDS = 0.1
RETRY_PAUSE_SECONDS = 0.02
# After this many requests without an answer, a late one is accepted.
MAX_MISSES = 3
# A main thread that was silent for this long waits for other threads that train.
SILENT_SECONDS = 30.0

Call = Callable[[], None]
Entry = Callable[[object], bool]


class PendingCalls:
    """`Py_AddPendingCall` of Python's C API. Created once and kept for the life of the process.

    A pending call is a C function of one pointer that returns 0, or -1 for an exception that it
    raised in the main thread's Python code. `PyObject_IsTrue` is such a function: it calls
    `__bool__`. A ctypes callback could not raise anything.
    """

    def __init__(self, untraced: Callable[[Entry], Entry]) -> None:
        """`untraced` keeps a compiler of Python code out of a function and of what it calls."""
        self._calls: deque[Call] = deque()
        self._late_calls: deque[tuple[Call, CodeType]] = deque()
        self._call_entry = _entry(untraced(shield(self._make_caller(), otherwise=False)))
        self._late_entry = _entry(untraced(self._make_late_caller()))

    def add(self, call: Call) -> None:
        """Schedule `call`, which does not run while the main thread stays inside a C call.

        An exception that a signal handler raises during the call, such as Ctrl-C or `sys.exit` in
        a SIGTERM handler, is raised in the script. Raises RuntimeError when the interpreter's
        queue of pending calls is full.
        """
        # Before it is scheduled: the main thread may run the next call at once.
        self._calls.append(_in_this_process(call))
        try:
            _schedule(self._call_entry)
        except RuntimeError:
            self._calls.pop()
            raise

    def raise_after(self, error: BaseException, code: CodeType) -> None:
        """Raise `error` in the main thread's Python code as soon as no frame of `code` runs there.

        For an exception that a signal handler raises inside a callback that must not raise. Raises
        RuntimeError when the interpreter's queue of pending calls is full.
        """

        def raise_it() -> None:
            raise error

        self.call_after(raise_it, code)

    def call_after(self, call: Call, code: CodeType) -> None:
        """Run `call` in the main thread as soon as no frame of `code` runs there.

        What it raises is raised in the script. Raises RuntimeError when the interpreter's queue of
        pending calls is full.
        """
        self._late_calls.append((_in_this_process(call), code))
        try:
            _schedule(self._late_entry)
        except RuntimeError:
            self._late_calls.pop()
            raise
        # Python 3.13 and newer run at most 32 pending calls at a time, and if the last of them was
        # alone in the queue, they forget the one that it scheduled (ceval_gil.c,
        # make_pending_calls). A second one, which schedules itself as well, is always behind it.
        with suppress(RuntimeError):
            _schedule(self._late_entry)

    def _make_caller(self) -> Entry:
        calls = self._calls

        def run_next(_: object) -> bool:
            if calls:
                calls.popleft()()
            return False

        return run_next

    def _make_late_caller(self) -> Entry:
        calls = self._late_calls

        def run_next(_: object) -> bool:
            if calls and _is_running(calls[0][1]):
                _schedule(self._late_entry)
            elif calls:
                calls.popleft()[0]()
            return False

        return run_next


def _in_this_process(call: Call) -> Call:
    """Return a `call` that does nothing in a forked child, which inherits pending calls."""
    pid = os.getpid()

    def guarded() -> None:
        if os.getpid() == pid:
            call()

    return guarded


def _entry(function: Entry) -> object:
    return type("Entry", (), {"__bool__": function})()


def _schedule(entry: object) -> None:
    python = ctypes.pythonapi
    if python.Py_AddPendingCall(python.PyObject_IsTrue, ctypes.py_object(entry)) != 0:
        raise RuntimeError("the interpreter has too many pending calls")


def _is_running(code: CodeType) -> bool:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented, and the only way
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


class MainThreadReader:
    """Runs one read at a time in the main thread.

    The background thread calls `request`, the training thread calls `at_step`.
    """

    def __init__(
        self,
        call_soon: Callable[[Call], None],
        clock: Callable[[], float] = time.monotonic,
        generator: random.Random | None = None,
    ) -> None:
        """`call_soon` is `Backend.call_soon`, `clock` returns monotonic seconds."""
        self._call_soon = call_soon
        self._clock = clock
        self._random = generator or random.Random()  # noqa: S311 - jitter, not a secret
        self._pending: _PendingRead | None = None
        self._misses = 0

    def request(self, read: Call, *, accept_late: bool) -> bool:
        """Ask the main thread to run `read` at a random time; return whether it has.

        With `accept_late` the read may also run late, even after this returns.
        """
        is_free = self._pending is None or self._pending.done()
        ran = is_free and self._request(read, accept_late=accept_late)
        self._misses = 0 if ran else self._misses + 1
        return ran

    def _request(self, read: Call, *, accept_late: bool) -> bool:
        accept_late = accept_late or self._misses >= MAX_MISSES
        now = self._clock()
        end = now + WAIT_SECONDS
        while now < end:
            deadline = float("inf") if accept_late else now + MAX_DELAY_SECONDS
            pending = _PendingRead(read, self._clock, deadline)
            self._call_soon(pending.run)
            self._pending = pending
            if not pending.wait(end - now) or pending.ran:
                return pending.ran
            # It was dropped because the main thread came late. After a fixed pause, the reads would
            # fall into step with the training loop.
            sleep(self._random.uniform(0, RETRY_PAUSE_SECONDS))
            now = self._clock()
        return False

    def at_step(self) -> None:
        """Run the pending read here if the main thread is silent and another thread trains."""
        pending = self._pending
        if (
            pending is not None
            and not pending.done()
            and self._clock() - pending.requested > SILENT_SECONDS
        ):
            pending.deadline = float("inf")
            pending.run()

    def stop(self) -> None:
        """Cancel the pending read; a thread that waits in `request` continues at once."""
        if self._pending is not None:
            self._pending.cancel()


class _PendingRead:
    """One read that runs at most once, not after its deadline, and not in a forked child."""

    def __init__(self, read: Call, clock: Callable[[], float], deadline: float) -> None:
        self.requested = clock()
        self.deadline = deadline
        self.ran = False
        self._read = read
        self._clock = clock
        self._pid = os.getpid()
        self._claimed = Lock()
        self._unfinished = Lock()
        self._unfinished.acquire()

    def run(self) -> None:
        claimed: list[bool] = []
        try:
            claimed += map(self._claimed.acquire, (False,))  # one call, as in `hold`
            if claimed[0] and self._clock() <= self.deadline and os.getpid() == self._pid:
                self._read()
                self.ran = True
        finally:
            if claimed and claimed[0]:
                self._unfinished.release()

    def cancel(self) -> None:
        if self._claimed.acquire(blocking=False):
            self._unfinished.release()

    def done(self) -> bool:
        return not self._unfinished.locked()

    def wait(self, seconds: float) -> bool:
        """Wait for the read to finish or be dropped; return whether it has.

        Only the requesting thread may call this.
        """
        is_done = self._unfinished.acquire(timeout=max(0.0, seconds))
        if is_done:
            self._unfinished.release()
        return is_done
