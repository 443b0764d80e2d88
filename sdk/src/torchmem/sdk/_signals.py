"""SIGTERM, as launchers send it: publish once more, then do what would have been done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


def before_sigterm(flush: Callable[[], None]) -> None:
    """Let `flush` run before the script's own SIGTERM handler.

    Only where there is one. A handler in Python waits until the main thread is back in Python, so in the place of the
    default action it would keep a rank alive that hangs in a collective; such a rank must die at once, and what it
    published last is at most one interval old.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    previous = signal.getsignal(signal.SIGTERM)
    if not callable(previous):
        return

    def flush_first(number: int, frame: FrameType | None) -> None:
        flush()
        previous(number, frame)

    signal.signal(signal.SIGTERM, flush_first)
