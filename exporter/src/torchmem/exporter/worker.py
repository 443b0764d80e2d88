"""Calls that may never return run in threads of their own, so that they block nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, Literal, TypeVar

K = TypeVar("K", bound=Hashable)
Ending = Literal["done", "expired", "busy"]


class Worker:
    """Runs jobs on a daemon thread with a deadline; while one is stuck no other is started."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._released = threading.Event()
        self._starting = threading.Lock()

    def run(self, job: Callable[[], None], seconds: float) -> Ending:
        """Wait for `job` at most `seconds`: done, expired (it goes on alone), or busy (another one runs).

        Safe to call from several threads.
        """
        finished = threading.Event()
        thread = threading.Thread(target=_run, args=(job, finished), name="torchmem-nvml", daemon=True)
        with self._starting:
            if self.is_busy:
                return "busy"
            self._thread, self._released = thread, finished
            thread.start()
        finished.wait(seconds)
        thread.join(0.1 if finished.is_set() else 0)
        return "expired" if thread.is_alive() else "done"

    @property
    def is_busy(self) -> bool:
        """Whether a job runs."""
        return self._thread is not None and self._thread.is_alive()

    def release(self) -> None:
        """Let whoever waits go on at once, as at the end of the process."""
        self._released.set()


class Workers(Generic[K]):
    """A worker, and for each key at most one more, which was left alone with a job that is stuck."""

    def __init__(self) -> None:
        self.current = Worker()
        self._stuck: dict[K, Worker] = {}

    def leave(self, key: K) -> None:
        """The job that runs now is stuck, and `key` says where: the next job gets another worker."""
        self._stuck[key], self.current = self.current, Worker()

    def stuck(self) -> frozenset[K]:
        """Where jobs are stuck still."""
        self._stuck = {key: worker for key, worker in self._stuck.items() if worker.is_busy}
        return frozenset(self._stuck)


def _run(job: Callable[[], None], finished: threading.Event) -> None:
    try:
        job()
    finally:
        finished.set()
