"""Calls that may never return run in threads of their own, so that they block nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

K = TypeVar("K", bound=Hashable)
Ending = Literal["done", "expired", "busy"]


class Worker:
    """Runs jobs on a daemon thread with a deadline; while one is stuck no other is started."""

    def __init__(self) -> None:
        self._task = _Task(lambda: None, has_ended=True)
        self._is_closed = False
        self._starting = threading.Lock()

    def run(self, job: Callable[[], None], seconds: float) -> Ending:
        """Wait for `job` at most `seconds`: done, expired (it goes on alone), or busy (another runs, or it is closed).

        Safe to call from several threads.
        """
        task = _Task(job)
        with self._starting:
            if self._is_closed or self.is_busy:
                return "busy"
            threading.Thread(target=task.run, name="torchmem-nvml", daemon=True).start()
            self._task = task
        task.released.wait(seconds)
        return "done" if task.has_ended else "expired"

    @property
    def is_busy(self) -> bool:
        """Whether a job runs."""
        return not self._task.has_ended

    def release(self) -> None:
        """Let whoever waits go on at once, as at the deadline."""
        with self._starting:
            self._task.released.set()

    def close(self) -> None:
        """Release, and start no further job."""
        with self._starting:
            self._is_closed = True
            self._task.released.set()


class Workers(Generic[K]):
    """A worker, and for each key at most one more, which was left alone with a job that is stuck."""

    def __init__(self) -> None:
        self.current = Worker()
        self._stuck: dict[K, Worker] = {}

    def leave(self, key: K) -> None:
        """The job that runs now is stuck, and `key` says where: the next job gets another worker."""
        # A new dictionary, and before the new worker: other threads ask meanwhile what is stuck.
        self._stuck = {**{key: self._stuck[key] for key in self.stuck()}, key: self.current}
        self.current = Worker()

    def stuck(self) -> frozenset[K]:
        """Where jobs are stuck still."""
        return frozenset(key for key, worker in self._stuck.items() if worker.is_busy)

    @property
    def is_busy(self) -> bool:
        """Whether any job runs, stuck or not."""
        return self.current.is_busy or bool(self.stuck())


@dataclass(slots=True)
class _Task:
    """A job in its thread, which goes on living for a while when the job has ended."""

    job: Callable[[], None]
    has_ended: bool = False
    released: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self.job()
        finally:
            self.has_ended = True
            self.released.set()
