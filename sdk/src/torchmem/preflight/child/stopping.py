"""How the script's process ends: by us, when it cannot go on or is done, or by its own hand past Python's exit."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_leave = os._exit  # itself, also where the script's is watched


def stop(sentence: str) -> NoReturn:
    """Say why it does not go on, and end the script with exit code 2, whichever of its threads this is."""
    print(f"torchmem: {sentence}", file=sys.stderr)
    if threading.current_thread() is not threading.main_thread():
        leave(2)
    raise SystemExit(2)


def leave(exit_code: int) -> NoReturn:
    """End the process at once, without Python's exit; what the script has printed is not lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or None, or a pipe that nobody reads
            stream.flush()
    _leave(exit_code)


def before_leaving(callback: Callable[[], None]) -> None:
    """Run `callback` when the script calls `os._exit`, as multiprocessing does in a forked child; atexit is skipped."""

    def watched(status: int) -> NoReturn:
        try:
            callback()
        finally:
            _leave(status)

    os._exit = watched
