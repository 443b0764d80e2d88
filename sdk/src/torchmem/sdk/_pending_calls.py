"""Running a function in the main thread, between two bytecodes of whatever it does, as Python runs signal handlers."""

from __future__ import annotations

import ctypes
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
