"""What interrupts the SDK's code belongs to the script: it arrives there, and nothing breaks."""

from __future__ import annotations

import ctypes
import functools
import logging
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import pytest
from support.garbage import no_collection
from support.threads import SAMPLER, thread_names
from support.waiting import until

from torchmem.sdk import instrument
from torchmem.sdk.monitor import Monitor
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.safety.interruptions import is_interruption
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu

# A file that the standard library was opening when it was interrupted is closed with its object.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

MIB = 1 << 20
Opener = Callable[..., Session]
Handler = Callable[..., object]


class ScriptError(Exception):
    """An exception of the script's own."""


def interrupt(handler: Handler, call: Callable[[], object], seconds: float) -> None:
    """Repeat `call` until SIGALRM comes, whose handler raises; return if nothing was raised.

    The timer may have run out some time before the signal comes. The logger is off: an interruption
    inside logging could keep logging's lock, and every other thread that logs would then wait.
    """
    previous = signal.signal(signal.SIGALRM, handler)
    logger = logging.getLogger("torchmem")
    arrived, notified = socket.socketpair()
    with arrived, notified, no_collection():
        notified.setblocking(False)
        signal.set_wakeup_fd(notified.fileno())
        logger.disabled = True
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            while not select.select([arrived], [], [], 0)[0]:
                call()
        finally:
            logger.disabled = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGALRM, previous)


def delays(number: int) -> list[float]:
    """Times of an interruption in seconds, so that it comes at many places of a short call."""
    return [2e-5 + index % 100 * 7e-6 for index in range(number)]


def fail(*_: object) -> NoReturn:
    """A signal handler that raises."""
    raise ScriptError


def fail_late(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler that no longer has its frame when it raises."""
    frame = None
    raise TimeoutError(number, frame)


class FailingObject:
    """A signal handler that is not a function and raises in a function that it calls."""

    def __call__(self, *arguments: object) -> None:
        fail(*arguments)


HANDLERS: dict[str, Handler] = {
    "function": fail,
    "without_frame": fail_late,
    "lambda": lambda *_: dict[str, int]()["missing"],
    "object": FailingObject(),
    "partial": functools.partial(fail, "bound"),
}


def phase(session: Session) -> None:
    """Measure an empty phase."""
    with session.phase("forward"):
        pass


CALLS: dict[str, Callable[[Session, SimulatedBackend], object]] = {
    "step": lambda session, _: session.step(),
    "optimizer": lambda _, backend: backend.step(),
    "phase": lambda session, _: phase(session),
}


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("name", CALLS)
def test_every_exception_of_a_signal_handler_arrives(
    open_session: Opener, backend: SimulatedBackend, name: str, handler: str
) -> None:
    """Wherever a handler interrupts the SDK, the script gets its exception; it is not counted."""
    session = open_session(backend, interval=1e-9)
    session.step()
    for seconds in delays(200):
        with pytest.raises((ScriptError, TimeoutError, KeyError)):
            interrupt(HANDLERS[handler], lambda: CALLS[name](session, backend), seconds)

    assert sum(session.errors.counts.values()) == 0


def test_monitoring_goes_on_after_an_interruption(
    open_session: Opener,
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    published: Callable[[], list[dict[str, Any]]],
) -> None:
    """After 300 timeouts in its code, which the script keeps, the SDK reads and publishes."""
    session = open_session(backend, interval=1e-9)
    session.step()
    kept = []
    for seconds in delays(300):
        with pytest.raises(ScriptError) as caught:
            interrupt(fail, session.step, seconds)
        kept.append(caught.value)
    allocator.malloc(30 * MIB)
    session.step()
    session.close()

    assert sum(session.errors.counts.values()) == 0
    (sample,) = published()
    assert sample["devices"][0]["allocator"]["allocated_bytes"]["large"] == 30 * MIB


class InterruptedStart:
    """A trace function that raises at one of the lines that start the monitoring.

    A line that runs again counts once, except the lines of `Monitor.start` itself.
    """

    def __init__(self, number: int) -> None:
        self.lines_left = number
        self._is_starting = False
        self._run: set[tuple[CodeType, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        """Trace one event."""
        if frame.f_code is Monitor.start.__code__ and event in {"call", "return"}:
            self._is_starting = event == "call"
        if self._is_starting and event == "line" and self._counts(frame):
            self.lines_left -= 1
            if self.lines_left == 0:
                fail(frame, event, argument)
        return self if str(frame.f_globals.get("__name__")).startswith("torchmem.sdk.") else None

    def _counts(self, frame: FrameType) -> bool:
        """Return whether the line is of `Monitor.start`, or runs for the first time."""
        line = frame.f_code, frame.f_lineno
        has_run = line in self._run
        self._run.add(line)
        return not has_run or frame.f_code is Monitor.start.__code__


def is_interrupted(number: int, call: Callable[[], object]) -> bool:
    """Interrupt the start in `call` at line `number`; return whether it has that many lines.

    Python's collector, whose callbacks would be traced too, does not run meanwhile.
    """
    start, previous = InterruptedStart(number), sys.gettrace()
    sys.settrace(start)
    try:
        with suppress(ScriptError), no_collection():
            call()
    finally:
        sys.settrace(previous)
    return start.lines_left <= 0


def check_monitoring(session: Session, allocator: DeviceCachingAllocator) -> None:
    """Take a step and run out of memory; there is one thread of the SDK, and no error."""
    session.step()
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(100 * MIB)
    until(lambda: SAMPLER in thread_names())
    assert thread_names().count(SAMPLER) == 1
    assert sum(session.errors.counts.values()) == 0


@pytest.mark.parametrize("is_initialized", [False, True], ids=["at CUDA's start", "instrument"])
def test_an_interrupted_start_is_made_up_for(
    open_session: Opener,
    published: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
    is_initialized: bool,
) -> None:
    """Wherever the start is interrupted, the next step or session monitors the process, once."""
    for number in count(1):
        shutil.rmtree(tmp_path)
        allocator = DeviceCachingAllocator(SimulatedGpu(64 * MIB, context_bytes=0, uuid="GPU-1"))
        backend = SimulatedBackend([allocator], initialized=is_initialized)
        if is_initialized:
            goes_on = is_interrupted(number, lambda: open_session(backend))  # noqa: B023
            session = open_session(SimulatedBackend([allocator]), interval=1e-9)
        else:
            session = open_session(backend, interval=1e-9)
            goes_on = is_interrupted(number, backend.init)
        if not goes_on:
            break
        check_monitoring(session, allocator)
        (sample,) = published()
        assert sample["devices"][0]["counters"]["ooms"] == {"capacity": 1}, number
        session.close()
        assert [sample["ended"] for sample in published()] == ["exited"]
    assert number > 50


def test_an_interrupted_close_is_finished_by_the_next(
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Callable[[], list[dict[str, Any]]],
) -> None:
    """A timeout in `close()` arrives, and the last state is still published as ended."""
    for seconds in delays(30):
        backend = SimulatedBackend([allocator])
        session = open_session(backend)
        session.step()
        with pytest.raises(ScriptError):
            interrupt(fail, session.close, seconds)
        session.close()
        assert [sample["ended"] for sample in published()] == ["exited"]


def test_a_timeout_in_instrument_arrives(allocator: DeviceCachingAllocator) -> None:
    """A timeout in `instrument()` arrives and leaves no hook behind."""
    backend, sessions = SimulatedBackend([allocator], initialized=False), list[Session]()

    def start() -> None:
        sessions.append(instrument(backend=backend))
        sessions[-1].close()

    for seconds in delays(100):
        with pytest.raises(ScriptError):
            interrupt(fail, start, seconds)
    start()
    backend.step()
    assert all(session.closed for session in sessions)


def test_a_trace_function_may_raise(open_session: Opener, backend: SimulatedBackend) -> None:
    """An exception of the script's trace function reaches the script."""
    session = open_session(backend, interval=1e-9)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return fail(frame, event, argument) if frame.f_code.co_name == "read_stats" else trace

    previous = sys.gettrace()
    try:
        sys.settrace(trace)
        with pytest.raises(ScriptError):
            session.step()
    finally:
        sys.settrace(previous)

    assert sum(session.errors.counts.values()) == 0


def test_an_asynchronous_exception_arrives(open_session: Opener, backend: SimulatedBackend) -> None:
    """What another thread raises in the training thread, as timeout libraries do, is not caught."""
    session, thread = open_session(backend, interval=1e-9), threading.get_ident()
    session.step()

    kinds: list[type[Exception]] = [ScriptError, TimeoutError, ValueError] * 20
    coming: list[type[Exception]] = []

    def interrupt() -> None:
        """Raise each kind in the training thread some time after the thread has asked for it."""
        for kind in kinds:
            while not coming:
                time.sleep(0.001)
            coming.clear()
            time.sleep(0.002)
            arguments = ctypes.c_ulong(thread), ctypes.py_object(kind)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(*arguments)

    def train(kind: type[Exception]) -> None:
        coming.append(kind)
        while True:
            session.step()

    timer = threading.Thread(target=interrupt, daemon=True)
    timer.start()
    with no_collection():
        for kind in kinds:
            with pytest.raises(kind):
                train(kind)
    timer.join()

    assert sum(session.errors.counts.values()) == 0


def test_an_asynchronous_exception_may_come_before_the_first_instruction() -> None:
    """One that comes as a function is called is an interruption, whatever its last instruction is.

    In Python 3.10, the traceback then points before the code, where indexing finds its end.
    """

    def ends_with_reraise(call: Callable[[], object]) -> None:
        call()  # Python 3.10 does not look for exceptions before a `try`
        try:
            call()
        finally:
            call()

    arguments = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(TimeoutError)
    calls = (
        functools.partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, *arguments),
        functools.partial(ends_with_reraise, int),
    )
    with pytest.raises(TimeoutError) as raised:
        list(map(functools.partial.__call__, calls))  # no instruction comes between the two

    assert is_interruption(raised.value)


def test_the_recursion_limit_is_the_scripts(
    open_session: Opener, backend: SimulatedBackend
) -> None:
    """Where the script can still call a few functions, steps and phases do not raise."""
    session = open_session(backend, interval=1e-9)
    session.step()

    def nothing(depth: int = 4) -> None:
        if depth:
            nothing(depth - 1)

    def descend() -> None:
        try:
            nothing()
        except RecursionError:
            return
        session.step()
        backend.step()
        phase(session)
        descend()

    for _ in range(3):
        descend()


class FailingHandler(logging.Handler):
    """A logging handler of the script's that raises."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ScriptError(record.getMessage())


@pytest.mark.parametrize("raises", [True, False])
def test_a_failing_log_handler_is_reported_as_logging_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    """The script's handler stops neither step nor instrument(); stderr shows its traceback."""
    logger, handler = logging.getLogger("torchmem"), FailingHandler()
    monkeypatch.setattr(logging, "raiseExceptions", raises)
    logger.addHandler(handler)
    try:
        errors = Errors()
        with errors.suppress("stats"):
            raise RuntimeError("broken")
        errors.log_deferred()
    finally:
        logger.removeHandler(handler)

    assert raises == ("ScriptError: torchmem: stats failed" in capsys.readouterr().err)
