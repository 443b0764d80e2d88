"""The worker for driver calls, used from several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import until

from torchmem.exporter.worker import JobThread

CALLERS, JOBS = 8, 100


@pytest.mark.usefixtures("restless")
def test_concurrent_callers() -> None:
    """One job runs at a time, and "done" means that the caller's own job has run."""
    worker, running, done = JobThread(), threading.Lock(), list[int]()

    def job(number: int) -> None:
        assert running.acquire(blocking=False)
        done.append(number)
        running.release()

    def run(number: int) -> int | None:
        return number if worker.run(lambda: job(number), 60) == "done" else None

    with ThreadPoolExecutor(CALLERS) as pool:
        reported = {number for number in pool.map(run, range(CALLERS * JOBS)) if number is not None}

    assert reported
    assert reported == set(done)


def test_busy_worker() -> None:
    """While a job runs, the next one returns "busy" immediately."""
    worker, gate = JobThread(), threading.Event()
    assert worker.run(lambda: _wait(gate), 0.01) == "expired"

    assert worker.run(lambda: None, 60) == "busy"

    gate.set()


def test_a_job_is_done_when_it_has_ended() -> None:
    """A thread that ends late, as on a busy machine, delays neither the result nor the next job."""
    worker, gate, at_the_end = JobThread(), threading.Event(), threading.local()

    def job() -> None:
        at_the_end.waits = _Waits(gate)  # deleted when the thread ends

    endings = [worker.run(job, 60), worker.run(lambda: None, 60)]
    gate.set()

    assert endings == ["done", "done"]


def test_closed_worker() -> None:
    """Closing ends the wait for the job that is running, and no further job is started."""
    worker, gate, done = JobThread(), threading.Event(), list[int]()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.run, lambda: _wait(gate), 60)
        until(lambda: worker.is_busy)
        worker.close()
        assert waiting.result(30) == "expired"
    gate.set()
    until(lambda: not worker.is_busy)

    assert worker.run(lambda: done.append(1), 60) == "busy"
    assert done == []


class _Waits:
    """An object whose deletion takes as long as the test wants."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def __del__(self) -> None:
        self._gate.wait(60)


def _wait(gate: threading.Event) -> None:
    assert gate.wait(60)
