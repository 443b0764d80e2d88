"""Threads for calls that may never return, so that such a call blocks nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

K = TypeVar("K", bound=Hashable)
Ending = Literal["done", "expired", "busy"]


class JobThread:
    """Runs one job at a time in a daemon thread, and waits for it up to a deadline."""

    def __init__(self) -> None:
        self._job = _Job(lambda: None, has_ended=True)
        self._is_closed = False
        self._starting = threading.Lock()

    def run(self, function: Callable[[], None], seconds: float) -> Ending:
        """Run `function` and wait for it at most `seconds`; safe to call from several threads.

        Returns "done", "expired" if it is still running, or "busy" if it was not started because
        another job is running or the worker is closed.
        """
        job = _Job(function)
        with self._starting:
            if self._is_closed or self.is_busy:
                return "busy"
            threading.Thread(target=job.run, name="torchmem-nvml", daemon=True).start()
            self._job = job
        job.released.wait(seconds)
        return "done" if job.has_ended else "expired"

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return not self._job.has_ended

    def release(self) -> None:
        """Stop waiting for the job that is running, as at the deadline."""
        with self._starting:
            self._job.released.set()

    def close(self) -> None:
        """Stop waiting and start no further job."""
        with self._starting:
            self._is_closed = True
            self._job.released.set()


class JobThreads(Generic[K]):
    """The current worker, and at most one more for each key, whose job is stuck."""

    def __init__(self) -> None:
        self.current = JobThread()
        self._stuck: dict[K, JobThread] = {}

    def leave(self, key: K) -> None:
        """Leave the job that is running alone, stuck at `key`, and create a new current worker."""
        # A new dictionary, and before the new worker: other threads call `stuck` meanwhile.
        self._stuck = {**{key: self._stuck[key] for key in self.stuck()}, key: self.current}
        self.current = JobThread()

    def stuck(self) -> frozenset[K]:
        """Return the keys whose jobs are still stuck."""
        return frozenset(key for key, worker in self._stuck.items() if worker.is_busy)

    @property
    def is_busy(self) -> bool:
        """Whether any job is running, stuck or not."""
        return self.current.is_busy or bool(self.stuck())


@dataclass(slots=True)
class _Job:
    """A function in a thread; the thread can outlive the function for a while."""

    function: Callable[[], None]
    has_ended: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.function()
        finally:
            self.has_ended = True
            self.released.set()
