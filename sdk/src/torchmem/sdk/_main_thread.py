"""Running a function in the main thread, between two bytecodes of whatever it does, as Python runs signal handlers.

Moments at which the allocator may be read from outside the training thread, without a stall for anyone.

Reading it takes the allocator's mutex with the GIL held. Whoever is inside cudaMalloc holds that mutex too, perhaps
for ever in a driver that hangs, and then every Python thread would wait with us. So the sampler does not read: it asks
the main thread to, which does so between two bytecodes and therefore never inside the driver.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

# The way out of a callback is a few bytecodes.
LEAVING_SECONDS = 0.01

Call = Callable[[], None]
Entry = Callable[[object], bool]


class PendingCalls:
    """`Py_AddPendingCall` of Python's C interface; made once and kept for the life of the process.

    A pending call is a C function of one pointer that gives 0, or -1 for an exception that it raised in the main
    thread's Python code. So is `PyObject_IsTrue`: it calls `__bool__`. A callback made by ctypes could raise nothing.
    """

    def __init__(self, untraced: Callable[[Entry], Entry]) -> None:
        """`untraced` keeps a compiler of Python code away from a function and from what it calls."""
        self._calls: deque[Call] = deque()
        self._entry = type("Entry", (), {"__bool__": untraced(self._make_entry())})()

    def add(self, call: Call) -> None:
        """Ask for `call`; it never runs while the main thread stays inside a call to C.

        What a signal handler raises meanwhile, as Ctrl-C or `sys.exit` in one for SIGTERM, is raised in the script.
        Raises RuntimeError when the interpreter takes no more of them.
        """
        self._calls.append(call)
        python = ctypes.pythonapi
        if python.Py_AddPendingCall(python.PyObject_IsTrue, ctypes.py_object(self._entry)) != 0:
            self._calls.pop()
            raise RuntimeError("the interpreter has too many pending calls")

    def _make_entry(self) -> Entry:
        calls = self._calls

        def run_next(_: object) -> bool:
            if calls:
                calls.popleft()()
            return False

        return run_next


def raise_soon(error: BaseException) -> None:
    """Raise a copy of `error` in this thread's Python code once it has left the function that asks for it.

    What a signal handler raises while ours runs, as Ctrl-C or `sys.exit` in one for SIGTERM, belongs to the script.
    """
    kind = type(error)
    copy = type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, *error.args)})
    arguments = (threading.get_ident(), copy, sys._getframe(1))  # noqa: SLF001 - documented, and the only way
    threading.Thread(target=_raise_in, args=arguments, daemon=True).start()


def _raise_in(thread: int, kind: type[BaseException], frame: FrameType) -> None:
    while not _has_ended(frame):
        time.sleep(LEAVING_SECONDS)
    time.sleep(LEAVING_SECONDS)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _has_ended(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:  # it runs
        return False
    return True


Read = Callable[[], None]

# Later than this the main thread came out of a long call, such as a backward pass. What it sees then is the state
# after that call and no random moment.
PATIENCE_SECONDS = 0.005
# One call of `ask` waits no longer than this for punctual answers, with pauses of up to so much between them.
WAIT_SECONDS = 0.1
PAUSE_SECONDS = 0.02
# After so many calls of `ask` without an answer a late one is better than none.
MOST_MISSES = 3
# A main thread that was silent for so long waits for the threads that train.
SILENT_SECONDS = 30.0


class Moments:
    """Asks for one read at a time. `ask` belongs to the sampler's thread, `at_step` to the training thread."""

    def __init__(
        self,
        call_soon: Callable[[Read], None],
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        """`call_soon`: `Backend.call_soon`; `clock`: monotonic seconds."""
        self._call_soon = call_soon
        self._clock = clock
        self._chance = chance or random.Random()  # noqa: S311 - jitter, not a secret
        self._errand: _Errand | None = None
        self._misses = 0

    def ask(self, read: Read, *, patient: bool) -> bool:
        """Have `read` run at such a moment; whether it has. `patient`: also a late moment will do, even one to come."""
        ran = (self._errand is None or self._errand.done()) and self._ask(read, patient=patient)
        self._misses = 0 if ran else self._misses + 1
        return ran

    def _ask(self, read: Read, *, patient: bool) -> bool:
        now = self._clock()
        end = now + WAIT_SECONDS
        while now < end:
            latest = (
                float("inf") if patient or self._misses >= MOST_MISSES else now + PATIENCE_SECONDS
            )
            errand = _Errand(read, self._clock, latest)
            self._call_soon(errand.run)
            self._errand = errand
            if not errand.wait(end - now) or errand.ran:
                return errand.ran
            time.sleep(self._chance.uniform(0, PAUSE_SECONDS))
            now = self._clock()
        return False

    def at_step(self) -> None:
        """The end of a step: do what a silent main thread was asked for, as where other threads train."""
        errand = self._errand
        if (
            errand is not None
            and not errand.done()
            and self._clock() - errand.asked > SILENT_SECONDS
        ):
            errand.latest = float("inf")
            errand.run()

    def stop(self) -> None:
        """Nothing is asked for any more; who waits in `ask` goes on at once."""
        if self._errand is not None:
            self._errand.cancel()


class _Errand:
    """One read, run at most once, by whoever comes first; not after `latest`, and not in a forked child."""

    def __init__(self, read: Read, clock: Callable[[], float], latest: float) -> None:
        self.asked = clock()
        self.latest = latest
        self.ran = False
        self._read = read
        self._clock = clock
        self._pid = os.getpid()
        self._taken = threading.Lock()
        self._waiting = threading.Lock()
        self._waiting.acquire()

    def run(self) -> None:
        if self._taken.acquire(blocking=False):
            try:
                if self._clock() <= self.latest and os.getpid() == self._pid:
                    self._read()
                    self.ran = True
            finally:
                self._waiting.release()

    def cancel(self) -> None:
        if self._taken.acquire(blocking=False):
            self._waiting.release()

    def done(self) -> bool:
        return not self._waiting.locked()

    def wait(self, seconds: float) -> bool:
        """Whether it is over, `done` from then on; nobody else waits."""
        over = self._waiting.acquire(timeout=max(0.0, seconds))
        if over:
            self._waiting.release()
        return over
