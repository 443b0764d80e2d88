"""Calls of `sys.exit`, and which of them ends the process: SystemExit reaches no hook.

Without this module, a rank that gives up with `sys.exit(1)`, as argparse, click and many trainers
do, counts as one that has finished.

The interpreter frees an uncaught SystemExit when no frame is left on the stack
(`_Py_HandleSystemExit` in pythonrun.c, CPython 3.10 to 3.14). One that the script catches is freed
within one of its frames.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from torchmem.sample.native_threads import is_main_thread
from torchmem.sdk.safety.interruptions import shield

Exit = Callable[..., NoReturn]

_CHILD_MODULES = {"multiprocessing.popen_fork", "multiprocessing.forkserver"}


class ExitCall:
    """One call. It is a variable of the wrapper, so the traceback of its SystemExit keeps it."""

    __slots__ = ("__weakref__",)


class ExitCalls:
    """Wraps `sys.exit` between `install` and `remove`, and remembers its newest call.

    `is_error` and `handles_oom` describe that call: whether the exit status is not 0, and what
    `is_oom` returned for the exception that was being handled. `has_ended` is whether it has ended
    the program, and `is_open` whether it may have, because its SystemExit still exists.
    """

    def __init__(self, is_oom: Callable[[BaseException | None], bool]) -> None:
        self.is_error = self.handles_oom = self.has_ended = False
        self._is_oom = is_oom
        self._previous: Exit = sys.exit
        self._exit: Exit | None = None
        self._newest: weakref.ref[ExitCall] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the SystemExit of the newest call has not been caught and freed."""
        return self.has_ended or (self._newest is not None and self._newest() is not None)

    @property
    def is_oom_or_error(self) -> bool:
        """Whether it was called while an OOM was being handled, or with an error code."""
        return self.handles_oom or self.is_error

    def install(self) -> None:
        """Wrap the current `sys.exit`, unless it is already wrapped."""
        if self._exit is None or sys.exit is not self._exit:
            self._previous = sys.exit
            self._exit = sys.exit = _wrapped(shield(self._note), self._previous)

    def remove(self) -> None:
        """Set the previous `sys.exit` again, unless someone has replaced it since."""
        if self._exit is not None and sys.exit is self._exit:
            sys.exit = self._previous

    def _note(self, arguments: tuple[Any, ...]) -> ExitCall:
        call, handled = ExitCall(), sys.exc_info()[1]
        if is_main_thread():
            code = arguments[0] if arguments else None
            # After Ctrl-C, scripts exit with an error code, but the user has ended the run.
            self.is_error = not is_success(code) and not isinstance(handled, KeyboardInterrupt)
            self.handles_oom = self._is_oom(handled)
            self.has_ended = False
            self._newest = weakref.ref(call, self._freed)
        return call

    def _freed(self, reference: weakref.ref[ExitCall]) -> None:
        if reference is self._newest:
            self.has_ended = sys._getframe().f_back is None  # noqa: SLF001 - documented


def is_success(code: object) -> bool:
    """Return whether a SystemExit with this code ends the process with status 0."""
    return code is None or (isinstance(code, int) and code & 0xFF == 0)


def _wrapped(note: Callable[[tuple[Any, ...]], ExitCall | None], previous: Exit) -> Exit:
    """Return a function that is pickled as `sys.exit`, like the one that it calls."""

    @functools.wraps(previous)
    def exit(*arguments: Any) -> NoReturn:  # noqa: A001 - its name in a traceback
        _call = note(arguments)
        previous(*arguments)

    return exit


def child_exit_code() -> int | None:
    """Return the exit code of this child of multiprocessing while its exit functions run.

    None elsewhere, and before Python 3.13, where they run while its exception propagates. Since
    then they run at the end of `Popen._launch` (multiprocessing/popen_fork.py) or
    `forkserver.main`, where the code is a variable.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - documented
    while frame is not None and frame.f_code.co_name != "_bootstrap":  # where it propagates
        if frame.f_globals.get("__name__") in _CHILD_MODULES and "code" in frame.f_locals:
            code = frame.f_locals["code"]
            return code if isinstance(code, int) else None
        frame = frame.f_back
    return None
