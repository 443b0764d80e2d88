"""One driver call at a time in a thread of its own, so that a call that never returns blocks nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

Ending = Literal["done", "expired", "busy"]


class Worker:
    """Runs jobs on a daemon thread with a deadline; while one is stuck no other is started."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._released = threading.Event()

    def run(self, job: Callable[[], None], seconds: float) -> Ending:
        """Wait for `job` at most `seconds`: done, expired (it goes on alone), or busy (an earlier one is stuck)."""
        if self._thread is not None and self._thread.is_alive():
            return "busy"
        finished = threading.Event()
        self._released = finished
        self._thread = threading.Thread(target=_run, args=(job, finished), name="torchmem-nvml", daemon=True)
        self._thread.start()
        finished.wait(seconds)
        self._thread.join(0.1 if finished.is_set() else 0)
        return "expired" if self._thread.is_alive() else "done"

    def release(self) -> None:
        """Let whoever waits go on at once, as at the end of the process."""
        self._released.set()


def _run(job: Callable[[], None], finished: threading.Event) -> None:
    try:
        job()
    finally:
        finished.set()
