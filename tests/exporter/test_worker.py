"""The thread that driver calls run on, asked from several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.waiting import until

from torchmem.exporter.worker import Worker

CALLERS, JOBS = 8, 100


@pytest.mark.usefixtures("restless")
def test_callers_at_once() -> None:
    """However many ask at the same moment, one job runs at a time, and who is told `done` had it done."""
    worker, running, done = Worker(), threading.Lock(), list[int]()

    def job(number: int) -> None:
        assert running.acquire(blocking=False)
        done.append(number)
        running.release()

    def ask(number: int) -> int | None:
        return number if worker.run(lambda: job(number), 60) == "done" else None

    with ThreadPoolExecutor(CALLERS) as pool:
        told = {number for number in pool.map(ask, range(CALLERS * JOBS)) if number is not None}

    assert told
    assert told == set(done)


def test_end_while_a_job_runs() -> None:
    """A job that runs is not disturbed by the next: that one is told `busy` at once."""
    worker, gate = Worker(), threading.Event()
    assert "expired" == worker.run(lambda: _wait(gate), 0.01)

    assert "busy" == worker.run(lambda: None, 60)

    gate.set()


def test_a_job_is_done_when_it_has_ended() -> None:
    """A thread that is slow to end after its job, as on a busy machine, holds up neither answer nor next job."""
    worker, gate, at_the_end = Worker(), threading.Event(), threading.local()

    def job() -> None:
        at_the_end.waits = _Waits(gate)  # let go when the thread ends

    endings = [worker.run(job, 60), worker.run(lambda: None, 60)]
    gate.set()

    assert ["done", "done"] == endings


def test_closed_worker() -> None:
    """Once closed it lets go whoever waits and starts nothing more, however long a deadline it is given."""
    worker, gate, done = Worker(), threading.Event(), list[int]()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(worker.run, lambda: _wait(gate), 60)
        until(lambda: worker.is_busy)
        worker.close()
        assert "expired" == waiting.result(30)
    gate.set()
    until(lambda: not worker.is_busy)

    assert "busy" == worker.run(lambda: done.append(1), 60)
    assert [] == done


class _Waits:
    """Something that takes its time to go."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def __del__(self) -> None:
        self._gate.wait(60)


def _wait(gate: threading.Event) -> None:
    assert gate.wait(60)
