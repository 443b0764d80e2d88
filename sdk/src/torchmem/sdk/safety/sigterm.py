"""What is done before the script's own SIGTERM handler, which launchers trigger.

Without this module, a script whose handler ends the process with `os._exit` never publishes what
has happened since the last interval, such as the OOM of which it is terminated.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from torchmem.sample.native_threads import is_main_thread


class SigtermFlush:
    """Calls `flush` before the script's handler, between `install` and `remove`.

    A handler in Python waits until the main thread is back in Python, so if it replaced the default
    action, it would keep a rank that hangs in a collective alive. Such a rank must die at once; its
    last published sample is at most one interval old.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush: Callable[[], None] | None = flush
        self._previous: Callable[[int, FrameType | None], object] | None = None
        self._handler = self._handle

    def install(self) -> None:
        """Wrap the script's handler; do nothing without one, or in another thread."""
        previous = signal.getsignal(signal.SIGTERM)
        if self._flush and is_main_thread() and callable(previous) and not self._is_installed:
            self._previous = previous
            signal.signal(signal.SIGTERM, self._handler)

    def remove(self) -> None:
        """Give the script's handler back.

        Where that is impossible, because the script has replaced it since or another thread calls,
        the wrapper only calls the script's handler from now on.
        """
        self._flush = None
        if self._previous and is_main_thread() and self._is_installed:
            signal.signal(signal.SIGTERM, self._previous)

    @property
    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self._handler

    def _handle(self, number: int, frame: FrameType | None) -> None:
        flush = self._flush
        if flush:
            flush()
        if self._previous:
            self._previous(number, frame)
