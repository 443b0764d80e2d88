"""Threads for calls that may never return, so that such a call blocks nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, Literal, TypeVar

_log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
Ending = Literal["done", "expired", "busy"]
_AT_WORK, _AT_REST = "torchmem-nvml", "torchmem-rest"


class JobThread:
    """Runs one job at a time in a daemon thread, and waits for it up to a deadline.

    The thread is kept for the next job, until the worker is closed: to start one costs a scrape as
    much as several driver calls.
    """

    def __init__(self) -> None:
        self._job = _Job(lambda: None, has_ended=True)
        self._is_closed = False
        self._starting = threading.Lock()
        self._jobs: SimpleQueue[_Job | None] | None = None

    def run(self, function: Callable[[], None], seconds: float) -> Ending:
        """Run `function` and wait for it at most `seconds`; safe to call from several threads.

        Returns "done", "expired" if it is still running, or "busy" if it was not started because
        another job is running or the worker is closed.
        """
        job = _Job(function)
        with self._starting:
            if self._is_closed or self.is_busy:
                return "busy"
            self._job = job
            self._queue().put(job)
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
        """Stop waiting and start no further job; the thread ends after the one that is running."""
        with self._starting:
            self._is_closed = True
            self._job.released.set()
            if self._jobs is not None:
                self._jobs.put(None)

    def _queue(self) -> SimpleQueue[_Job | None]:
        """Return the queue of the thread, which is started for the first job."""
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_run, args=(self._jobs,), name=_AT_REST, daemon=True).start()
        return self._jobs


class JobThreads(Generic[K]):
    """The current worker, and at most one more for each key, whose job is stuck."""

    def __init__(self) -> None:
        self.current = JobThread()
        self._stuck: dict[K, JobThread] = {}

    def leave(self, key: K) -> None:
        """Leave the job that is running alone, stuck at `key`, and create a new current worker."""
        # A new dictionary, and before the new worker: other threads call `stuck` meanwhile.
        self._stuck = {**{key: self._stuck[key] for key in self.stuck()}, key: self.current}
        left, self.current = self.current, JobThread()
        left.close()

    def stuck(self) -> frozenset[K]:
        """Return the keys whose jobs are still stuck."""
        return frozenset(key for key, worker in self._stuck.items() if worker.is_busy)

    @property
    def is_busy(self) -> bool:
        """Whether any job is running, stuck or not."""
        return self.current.is_busy or bool(self.stuck())


def _run(jobs: SimpleQueue[_Job | None]) -> None:
    """Run jobs until None comes."""
    thread = threading.current_thread()
    while job := jobs.get():
        thread.name = _AT_WORK
        try:
            job.run()
        except Exception:  # noqa: BLE001 - the next job needs the thread; it is logged
            _log.exception("a call that may hang failed")
        thread.name = _AT_REST


@dataclass(slots=True)
class _Job:
    """A function, whether it has ended, and an event for those who wait for it."""

    function: Callable[[], None]
    has_ended: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.function()
        finally:
            self.has_ended = True
            self.released.set()
