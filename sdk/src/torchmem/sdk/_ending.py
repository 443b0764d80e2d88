"""How the process ends, judging by uncaught exceptions and calls of `sys.exit`.

Among uncaught exceptions are those of libraries that get no memory from the driver. They do not
pass PyTorch's allocator, so no observer is called. The texts are those of NCCL, cuBLAS, cuDNN,
cuSOLVER, cuSPARSE, cuFFT, cuRAND, their ROCm counterparts, Triton, CuPy, and of PyTorch for calls
to the driver outside the caching allocator.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from torchmem.allocator.call_stack import Origin
from torchmem.sample.sample import Ending
from torchmem.sdk._call_stack import raising_origin
from torchmem.sdk._interruptions import is_interruption

MAX_CHAIN = 32
MAX_TEXT_LENGTH = 1 << 16

_LIBRARY_OOM = re.compile(
    r"\w+_STATUS_ALLOC(?:ATION)?_FAILED|CUFFT_ALLOC_FAILED|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"
    r"|(?:CUDA|HIP)(?: driver)? error: out of memory|Triton Error \[\w+\]: out of memory"
    r"|C(?:uda|UDA) failure (?:\d+ )?'out of memory'"
    r"|Failed to CUDA calloc(?: async)? (?P<bytes>\d{1,18}) bytes"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY"
)


@dataclass(frozen=True, slots=True)
class LibraryOom:
    """A library's failed allocation on the GPU; `requested` in bytes, None if the text lacks it."""

    requested: int | None
    origin: Origin


def library_oom(error: BaseException) -> LibraryOom | None:
    """Return the library's failed allocation that `error` is due to, or None.

    PyTorch's own OutOfMemoryError does not count: the allocator's observer reports it.
    """
    if is_oom(error):
        return None
    for link in _chain(error):
        match = _LIBRARY_OOM.search(_text(link))
        if match:
            requested = int(match["bytes"]) if match["bytes"] else None
            return LibraryOom(requested, raising_origin(link.__traceback__, match.string))
    return None


def is_oom(error: BaseException | None) -> bool:
    """Return whether PyTorch's OutOfMemoryError is `error`, its cause, or was being handled."""
    return any(
        kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch")
        for link in _chain(error)
        for kind in type(link).__mro__
    )


def ending_of(error: BaseException | None, *, oom_pending: bool) -> Ending:
    """Return the ending of a process that `error` ends; None is a normal end.

    With `oom_pending` no step has finished since an OutOfMemoryError, and any exception counts as
    that OOM. An exit with a code of 0 does not, unless it was called while the OOM was handled.
    Ctrl-C is an exit.
    """
    if error is None:
        return "exited"
    if is_oom(error) or library_oom(error) is not None:
        return "oom"
    is_clean = isinstance(error, SystemExit) and error.code in {None, 0}
    if oom_pending and not is_clean:
        return "oom"
    cause = error.__context__ if isinstance(error, SystemExit) else error
    failed = isinstance(cause, Exception) and not is_clean
    return "failed" if failed else "exited"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its cause, or else the one that was being handled, and so on."""
    for _ in range(MAX_CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _text(error: BaseException) -> str:
    """Return the text of an exception, or "" if it fails to provide one."""
    try:
        return str(error)[:MAX_TEXT_LENGTH]
    except Exception as failure:  # code of the script's
        if is_interruption(failure):
            raise
        return ""


def last_error() -> BaseException | None:
    """Return the uncaught exception that ends the process, as the interpreter keeps it.

    At an interactive prompt there is none, because the process outlives such exceptions.
    """
    if hasattr(sys, "ps1"):
        return None
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def in_excepthook() -> bool:
    """Return whether this thread is handling an exception that ends it."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented, and the only way
    while frame is not None and frame.f_code is not UncaughtErrors.in_main.__code__:
        frame = frame.f_back
    return frame is not None


class UncaughtErrors:
    """Handles uncaught exceptions, before the hooks that were installed earlier.

    `on_error` is called with an exception and whether it ends the main thread. It raises no
    exception itself; one that a signal handler raises in it reaches the script.
    """

    def __init__(self, on_error: Callable[[BaseException, bool], None]) -> None:
        self.exit_ends_oom = False
        self._installed = False
        self._on_error = on_error
        self._hook, self._thread_hook, self._exit = self.in_main, self._in_thread, self._at_exit
        self._previous_hook, self._previous_thread_hook = sys.excepthook, threading.excepthook
        self._previous_exit = sys.exit

    def install(self) -> None:
        """Set both hooks, once; each calls the one that was set before."""
        if self._installed:
            return
        # In this order an interruption does no harm: the next call does the rest.
        if sys.excepthook is not self._hook:
            self._previous_hook, sys.excepthook = sys.excepthook, self._hook
        if threading.excepthook is not self._thread_hook:
            self._previous_thread_hook = threading.excepthook
            threading.excepthook = self._thread_hook
        self._installed = True

    def remove(self) -> None:
        """Set the previous hooks again, unless someone has replaced these since."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
        if threading.excepthook is self._thread_hook:
            threading.excepthook = self._previous_thread_hook
        if sys.exit is self._exit:
            sys.exit = self._previous_exit

    def watch_exit(self) -> None:
        """See calls of `sys.exit` from now on, because SystemExit reaches no hook.

        Called at an OutOfMemoryError, so that `sys.exit` is PyTorch's and the script's own until
        then.
        """
        if sys.exit is not self._exit:
            self._previous_exit = sys.exit
            sys.exit = self._exit

    def in_main(self, kind: type[BaseException], error: BaseException, tb: Any) -> None:
        """Be `sys.excepthook`."""
        try:
            self._on_error(error, True)
        finally:
            self._previous_hook(kind, error, tb)

    def _in_thread(self, arguments: threading.ExceptHookArgs) -> None:
        try:
            if arguments.exc_value is not None:
                self._on_error(arguments.exc_value, False)
        finally:
            self._previous_thread_hook(arguments)

    def _at_exit(self, *arguments: Any) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            handled = is_oom(sys.exc_info()[1])
            self.exit_ends_oom = handled or any(code not in {None, 0} for code in arguments)
        self._previous_exit(*arguments)
