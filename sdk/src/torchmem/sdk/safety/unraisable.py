"""Interruptions of a callback from which nothing can be raised, such as one of `gc.callbacks`.

Without this module, a Ctrl-C or a timeout that comes while Python's collector runs may be lost: the
signal handler then runs in the SDK's function of `gc.callbacks`, and Python only prints what the
handler raises ("Exception ignored in").
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from torchmem.sample.native_threads import is_main_thread
from torchmem.sdk.safety.interruptions import is_interruption


class IgnoredInterruptions:
    """Wraps `sys.unraisablehook` between `install` and `remove`.

    An interruption of the callback with this `code` is raised in the script by `raise_after`, see
    `Backend.raise_after`.
    """

    def __init__(
        self, code: CodeType, raise_after: Callable[[BaseException, CodeType], None]
    ) -> None:
        self._code = code
        self._raise_after = raise_after
        self._hook = self._handle  # one object, which can be recognized
        self._previous = sys.unraisablehook

    def install(self) -> None:
        """Wrap the current hook, unless it is already wrapped."""
        if sys.unraisablehook is not self._hook:
            self._previous, sys.unraisablehook = sys.unraisablehook, self._hook

    def remove(self) -> None:
        """Set the previous hook again, unless someone has replaced it since."""
        if sys.unraisablehook is self._hook:
            sys.unraisablehook = self._previous

    def _handle(self, unraisable: Any) -> None:
        error, trace = unraisable.exc_value, unraisable.exc_traceback
        is_own = trace is not None and trace.tb_frame.f_code is self._code
        if is_own and is_main_thread() and is_interruption(error):
            self._raise_after(error, IgnoredInterruptions._handle.__code__)
        else:
            self._previous(unraisable)
