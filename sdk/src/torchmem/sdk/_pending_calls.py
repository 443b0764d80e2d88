"""Running a function in the main thread, between two bytecodes of whatever it does, as Python runs signal handlers."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable

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
            except BaseException as error:  # noqa: BLE001 - Ctrl-C, which C code would lose: it is the script's
                raise_later(type(error))
            return 0

        return run_next


def raise_later(kind: type[BaseException]) -> None:
    """Raise in this thread's Python code as soon as it goes on (`PyThreadState_SetAsyncExc`)."""
    thread = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(kind))
