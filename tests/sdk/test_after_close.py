"""What a session leaves in the process after `close()`: nothing that keeps it, and no hook."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import pytest
from support.threads import SAMPLER, thread_names
from support.waiting import until

from torchmem.sdk import Session, current_session, instrument, newest_sample
from torchmem.simulator.backend import SimulatedBackend

Handler = Callable[[int, FrameType | None], Any]


@pytest.fixture
def handled() -> Iterator[tuple[Handler, list[int]]]:
    """The script's own SIGTERM handler, and the signals that it got."""
    got: list[int] = []

    def handler(number: int, _: FrameType | None) -> None:
        got.append(number)

    previous = signal.signal(signal.SIGTERM, handler)
    yield handler, got
    signal.signal(signal.SIGTERM, previous)


def test_a_closed_session_is_collected(backend: SimulatedBackend, tmp_path: Path) -> None:
    """Nothing keeps a session that is closed and that the script has let go, each of 20 times."""
    known = []
    for number in range(20):
        session = instrument(backend=backend, run_dir=tmp_path, run=f"run-{number}")
        backend.step()
        session.close()
        known.append(ref(session))
        del session

    # `close` does not wait long for its thread, which keeps the session until it ends.
    until(lambda: SAMPLER not in thread_names() and not any(_alive(known)))
    assert current_session() is None
    last = newest_sample()
    assert last is not None
    assert (last[0].process.run, last[0].ended, last[1]) == ("run-19", "exited", tmp_path)


def _alive(known: list[ref[Session]]) -> list[Session | None]:
    """Return what is left of some sessions after a collection."""
    gc.collect()
    return [each() for each in known]


def test_a_session_without_cuda_is_collected(tmp_path: Path) -> None:
    """The same for a session that CUDA never started; the backend keeps the callback."""
    backend = SimulatedBackend([], initialized=False)
    session = instrument(backend=backend, run_dir=tmp_path)
    known = ref(session)
    session.close()
    del session
    until(lambda: not any(_alive([known])))
    backend.init()


def test_a_running_session_needs_no_reference(backend: SimulatedBackend, tmp_path: Path) -> None:
    """`instrument()` alone keeps the session until it ends."""
    known = ref(instrument(backend=backend, run_dir=tmp_path))
    gc.collect()
    session = known()
    assert session is not None
    assert session is current_session()
    session.close()


def test_hooks_are_given_back(
    backend: SimulatedBackend, tmp_path: Path, handled: tuple[Handler, list[int]]
) -> None:
    """After `close()` the script's SIGTERM handler, exception hooks and sys.exit are its own."""
    handler, got = handled

    def hooks() -> tuple[object, ...]:
        return signal.getsignal(signal.SIGTERM), sys.excepthook, threading.excepthook, sys.exit

    before = hooks()
    session = instrument(backend=backend, run_dir=tmp_path)
    backend.step()
    assert not [own for own, now in zip(before, hooks(), strict=True) if own is now]
    signal.raise_signal(signal.SIGTERM)
    session.close()

    assert hooks() == before
    assert signal.getsignal(signal.SIGTERM) is handler
    assert got == [signal.SIGTERM]


def test_a_handler_that_wraps_the_sdks_still_works(
    backend: SimulatedBackend, tmp_path: Path, handled: tuple[Handler, list[int]]
) -> None:
    """What the script has put on top stays; below it, the SDK only calls the script's handler."""
    session = instrument(backend=backend, run_dir=tmp_path)
    wrapped = [signal.getsignal(signal.SIGTERM)]

    def above(number: int, frame: FrameType | None) -> None:
        for handler in wrapped:
            assert callable(handler)
            handler(number, frame)

    signal.signal(signal.SIGTERM, above)
    known = ref(session)
    session.close()
    del session

    assert signal.getsignal(signal.SIGTERM) is above
    signal.raise_signal(signal.SIGTERM)
    assert handled[1] == [signal.SIGTERM]
    until(lambda: not any(_alive([known])))


def test_another_thread_may_close(
    backend: SimulatedBackend, tmp_path: Path, handled: tuple[Handler, list[int]]
) -> None:
    """Closed in a thread that may not set handlers, the wrapper stays and only passes on."""
    session = instrument(backend=backend, run_dir=tmp_path)
    thread = threading.Thread(target=session.close)
    thread.start()
    thread.join()
    published = newest_sample()
    signal.raise_signal(signal.SIGTERM)

    assert handled[1] == [signal.SIGTERM]
    assert newest_sample() == published
    assert sum(session.errors.counts.values()) == 0
