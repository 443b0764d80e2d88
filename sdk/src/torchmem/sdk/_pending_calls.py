"""Running a function in the main thread, between two bytecodes of whatever it does, as Python runs signal handlers."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable

# The way out of a callback is a few bytecodes; a thread that has just started waits for its turn anyway.
LEAVING_SECONDS = 0.01

Call = Callable[[], None]
Entry = Callable[[object], int]


class PendingCalls:
    """`Py_AddPendingCall` of Python's C interface; made once and kept for the life of the process."""

    def __init__(self, untraced: Callable[[Entry], Entry]) -> None:
        """`untraced` keeps a compiler of Python code away from a function and from what it calls."""
        self._calls: deque[Call] = deque()
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(untraced(self._make_entry()))

    def add(self, call: Call) -> None:
        """Ask for `call`, which must not raise; it never runs while the main thread stays inside a call to C.

        Raises RuntimeError when the interpreter takes no more of them.
        """
        self._calls.append(call)
        if ctypes.pythonapi.Py_AddPendingCall(self._entry, None) != 0:
            self._calls.pop()
            raise RuntimeError("the interpreter has too many pending calls")

    def _make_entry(self) -> Entry:
        calls = self._calls

        def run_next(_: object) -> int:
            try:
                with contextlib.suppress(IndexError):
                    calls.popleft()()
            except BaseException as error:  # noqa: BLE001 - C code would lose it, see raise_soon
                raise_soon(error)
            return 0

        return run_next


def raise_soon(error: BaseException) -> None:
    """Raise a copy of `error` in this thread's Python code once it has left ours.

    What a signal handler raises while ours runs, as Ctrl-C or `sys.exit` in one for SIGTERM, belongs to the script.
    """
    kind = type(error)
    copy = type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, *error.args)})
    threading.Thread(target=_raise_in, args=(threading.get_ident(), copy), daemon=True).start()


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    time.sleep(LEAVING_SECONDS)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
