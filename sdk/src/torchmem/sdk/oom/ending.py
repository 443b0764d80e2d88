"""How the process ends, judging by uncaught exceptions and calls of `sys.exit`.

Among uncaught exceptions are those of libraries that get no memory from the driver, of engines that
refuse to start, and of PyTorch where it fails before it calls its observer. Their texts are those
that `torchmem.explain.texts.formats` marks.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from types import FrameType
from typing import Any, Protocol

from torchmem.explain.call_stack import Origin
from torchmem.explain.texts.exceptions import cause_of, unseen_oom
from torchmem.sample.sample import Ending, OomCause
from torchmem.sdk.identity import is_multiprocessing_child
from torchmem.sdk.oom.note import TracebackNote
from torchmem.sdk.part import Part
from torchmem.sdk.pytorch.call_stack import raising_origin
from torchmem.sdk.safety.errors import Errors, Stage
from torchmem.sdk.safety.exit_calls import ExitCalls, child_exit_code, is_success
from torchmem.sdk.safety.interruptions import is_interruption

MAX_CHAIN = 32
WAKE_UP = "wake_up"
"""The format of an engine that cannot wake up, which its own state explains."""
MAX_TEXT_LENGTH = 1 << 16
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())  # since Python 3.11


@dataclass(frozen=True, slots=True)
class FailedWakeUp:
    """An inference engine that could not wake up; sizes in bytes.

    device: torch's index.
    asleep: what still sleeps, which PyTorch counts as reserved.
    """

    device: int
    asleep: int


@dataclass(frozen=True, slots=True)
class LibraryOom:
    """A failed allocation on the GPU that PyTorch's observer has not seen.

    `requested` is in bytes, None if the text lacks it. `wake_up` is set if an engine failed to
    wake up; then `requested` is what it was still to take. `cause` is what the text says; None if
    the state of the allocator decides.
    """

    requested: int | None
    origin: Origin
    wake_up: FailedWakeUp | None = None
    cause: OomCause | None = "library"


def library_oom(error: BaseException) -> LibraryOom | None:
    """Return the failed allocation outside PyTorch's observer that `error` is due to, or None.

    PyTorch's own OutOfMemoryError does not count: the allocator's observer reports it.
    """
    if is_oom(error):
        return None
    for link in _chain(error):
        text = _text(link)
        message = unseen_oom(text)
        if message:
            origin = raising_origin(link.__traceback__, text)
            cause = "library" if message.format.name == WAKE_UP else cause_of(message)
            return LibraryOom(message.numbers.requested, origin, cause=cause)
    return None


def is_oom(error: BaseException | None) -> bool:
    """Return whether PyTorch's OutOfMemoryError is `error`, its cause, or was being handled."""
    return any(map(_is_pytorch_oom, _chain(error)))


def _is_pytorch_oom(error: BaseException) -> bool:
    return any(
        kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch")
        for kind in type(error).__mro__
    )


def _is_unseen_oom(error: BaseException) -> bool:
    return unseen_oom(_text(error)) is not None


def _oom_in(error: BaseException) -> BaseException | None:
    """Return the newest OOM, of PyTorch or else of a library, that `error` is due to."""
    links = tuple(_chain(error))
    ooms = *filter(_is_pytorch_oom, links), *filter(_is_unseen_oom, links)
    return next(iter(ooms), None)


def ending_of(error: BaseException | None, *, oom_pending: bool) -> Ending:
    """Return the ending of a process that `error` ends; None is a normal end.

    With `oom_pending` no step has finished since an OutOfMemoryError, and any exception counts as
    that OOM. An exit with a code of 0 does not, unless it was called while the OOM was handled.
    An exit with another code is a failure. Ctrl-C is an exit.
    """
    if error is None:
        return "exited"
    if is_oom(error) or library_oom(error) is not None:
        return "oom"
    is_clean = isinstance(error, SystemExit) and is_success(error.code)
    if oom_pending and not is_clean:
        return "oom"
    if isinstance(error, SystemExit):
        is_clean = is_clean or isinstance(error.__context__, KeyboardInterrupt)
        return "exited" if is_clean else "failed"
    return "failed" if isinstance(error, Exception) else "exited"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, those of its group, its cause, or else what was handled, and so on."""
    waiting = deque([error])
    for _ in range(MAX_CHAIN):
        link = waiting.popleft() if waiting else None
        if link is None:
            return
        yield link
        before = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        members = link.exceptions if isinstance(link, _GROUP) else ()
        waiting.extend((*members, before) if before else members)


def keeps_frame(error: BaseException, file: str, function: str) -> bool:
    """Return whether a traceback of an exception keeps a frame of a function, and its variables.

    Where a library has caught the exception and raises another one, from its text, none does.
    """
    wanted = file.rpartition("/")[2], function.rpartition(".")[2]
    codes = (frame.f_code for link in _chain(error) for frame, _ in walk_tb(link.__traceback__))
    return wanted in ((code.co_filename.rpartition("/")[2], code.co_name) for code in codes)


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
    # Python 3.12 and newer set `last_exc`.
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def in_excepthook() -> bool:
    """Return whether this thread is handling an exception that ends it."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented, and the only way
    while frame is not None and frame.f_code is not UncaughtErrors.in_main.__code__:
        frame = frame.f_back
    return frame is not None


class _Monitor(Protocol):
    """What `UncaughtErrors` needs of a monitor, which imports this module."""

    oom_pending: bool

    def on_library_oom(self, failed: LibraryOom) -> None:
        """Keep the evidence of a library's OOM."""


class UncaughtErrors(Part):
    """Handles uncaught exceptions, before the hooks that were installed earlier.

    It counts a library's OOM, has the traceback of an OOM say why, and keeps how the process ends.
    No exception of its own reaches the script, but one that a signal handler raises in it does.
    `is_explained` is whether stderr has told why the process has died of an OOM.
    """

    stage: Stage = "oom"
    is_explained = False

    def __init__(self, errors: Errors) -> None:
        self._errors = errors
        self._monitor: _Monitor | None = None
        self._add_details: Callable[[BaseException], None] | None = None
        self._note = TracebackNote()
        self._ending: Ending | None = None
        self._installed = False
        self._hook, self._thread_hook = self.in_main, self._in_thread
        self._previous_hook, self._previous_thread_hook = sys.excepthook, threading.excepthook
        self._exits = ExitCalls(is_oom)

    def follow(self, monitor: _Monitor) -> None:
        """Report to this monitor, which has no reports of OOMs yet."""
        self._monitor, self._add_details = monitor, None
        self._note, self.is_explained = TracebackNote(), False

    def at_death(self, add_details: Callable[[BaseException], None]) -> None:
        """Have the newest report of an OOM completed when the process dies of this exception."""
        self._add_details = add_details

    def explain(self, lines: Callable[[], Sequence[str]]) -> None:
        """Have the traceback of an OOM end with the lines that are returned then."""
        self._note = TracebackNote(lines)

    def begin(self) -> None:
        """Set both hooks and wrap `sys.exit`, once; each calls what was set before."""
        if self._installed:
            return
        # In this order an interruption does no harm: the next call does the rest.
        if sys.excepthook is not self._hook:
            self._previous_hook, sys.excepthook = sys.excepthook, self._hook
        if threading.excepthook is not self._thread_hook:
            self._previous_thread_hook = threading.excepthook
            threading.excepthook = self._thread_hook
        self._exits.install()
        self._installed = True

    def ending(self, error: BaseException | None) -> Ending:
        """Return how the process ends, with what is known of it: an exception that ends it."""
        if self._ending is None and error is not None:
            self._handle(error, ends_process=True)
            # An uncaught one has reached `sys.excepthook`, see `_explain_below`.
            if not isinstance(error, SystemExit) and error is not last_error():
                self.is_explained = self._explain(error)
        if self._ending is None:
            self._ending = self._exit_ending()
        with self._errors.suppress("exit"):
            self._explain_below(error)
        self._write_below()
        return self._ending

    def _handle(self, error: BaseException, *, ends_process: bool) -> None:
        """Count a library's uncaught OOM, and keep how it ends the process."""
        monitor = self._monitor
        if monitor is None:
            return
        with self._errors.suppress("exit"):
            oom = library_oom(error)
            if oom is not None:
                monitor.on_library_oom(oom)
            if ends_process and self._add_details and (oom is not None or is_oom(error)):
                self._add_details(error)
            if ends_process and not hasattr(sys, "ps1"):
                self._ending = ending_of(error, oom_pending=monitor.oom_pending)

    def _explain(self, error: BaseException) -> bool:
        """Add a note to the OOM that `error` is due to; return whether it has one."""
        with self._errors.suppress("exit"):
            oom = _oom_in(error)
            return oom is not None and self._note.add_to(oom)
        return False

    def _explain_below(self, error: BaseException | None) -> None:
        """Write why the process died of an OOM, if its traceback has been written without that.

        A hook that did not call `in_main` has written it, or multiprocessing: in Python 3.13 before
        the session ends, and torch.multiprocessing sends it to the parent.
        """
        if self._ending == "oom" and not self.is_explained:
            is_uncaught = error is not None and error is last_error() and _oom_in(error) is not None
            if is_uncaught or is_multiprocessing_child():
                self.is_explained = self._note.write()

    def _exit_ending(self) -> Ending:
        """Return the ending of a process that no uncaught exception ends."""
        exits = self._exits
        oom_pending = self._monitor is not None and self._monitor.oom_pending
        if hasattr(sys, "ps1"):
            return "exited"
        is_error = not is_success(child_exit_code())
        if oom_pending and (is_error or (exits.is_open and exits.is_oom_or_error)):
            return "oom"
        return "failed" if is_error or (exits.has_ended and exits.is_error) else "exited"

    def remove(self) -> None:
        """Set the previous hooks again, unless someone has replaced these since."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
        if threading.excepthook is self._thread_hook:
            threading.excepthook = self._previous_thread_hook
        self._exits.remove()
        # A hook that was set after these and calls them keeps this object alive, and would keep the
        # monitor alive, too.
        self._monitor = self._add_details = None
        self._note = TracebackNote()

    def in_main(self, kind: type[BaseException], error: BaseException, tb: Any) -> None:
        """Be `sys.excepthook`."""
        try:
            self._handle(error, ends_process=True)
            self.is_explained = self._explain(error)
        finally:
            self._previous_hook(kind, error, tb)
        self._write_below()

    def _in_thread(self, arguments: threading.ExceptHookArgs) -> None:
        try:
            if arguments.exc_value is not None:
                self._handle(arguments.exc_value, ends_process=False)
                self._explain(arguments.exc_value)
        finally:
            self._previous_thread_hook(arguments)
        self._write_below()

    def _write_below(self) -> None:
        with self._errors.suppress("exit"):
            self._note.write_below()
