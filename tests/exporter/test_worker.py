"""The thread that driver calls run on, asked from several threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchmem.exporter.worker import Worker

CALLERS, JOBS = 8, 100


@pytest.fixture
def _restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_restless")
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


def _wait(gate: threading.Event) -> None:
    assert gate.wait(60)
