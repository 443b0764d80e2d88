"""When the sampler's reads run: at random times in the main thread, and never where they block."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

import pytest

from torchmem.sdk.safety.main_thread import (
    MAX_DELAY_SECONDS,
    MAX_MISSES,
    SILENT_SECONDS,
    WAIT_SECONDS,
    MainThreadReader,
    PendingCalls,
)


class BusyMainThread:
    """A main thread that returns to Python only when the test lets it, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.requested: deque[Callable[[], None]] = deque()
        self.reads = 0

    def call_soon(self, call: Callable[[], None]) -> None:
        self.requested.append(call)

    def resume(self, after: float) -> None:
        self.now += after
        while self.requested:
            self.requested.popleft()()

    def read(self) -> None:
        self.reads += 1


@pytest.fixture
def main() -> BusyMainThread:
    return BusyMainThread()


@pytest.fixture
def reader(main: BusyMainThread) -> MainThreadReader:
    return MainThreadReader(main.call_soon, clock=lambda: main.now)


def test_a_read_after_a_long_call_is_dropped(
    main: BusyMainThread, reader: MainThreadReader
) -> None:
    """The end of a backward pass is not a random time, so a late main thread reads nothing."""
    assert not reader.request(main.read, accept_late=False)
    main.resume(2 * MAX_DELAY_SECONDS)

    assert main.reads == 0


def test_after_some_misses_a_late_read_is_accepted(
    main: BusyMainThread, reader: MainThreadReader
) -> None:
    """When no answer was punctual a few times, or no step comes, the next late one counts."""
    for _ in range(MAX_MISSES):
        reader.request(main.read, accept_late=False)
        main.resume(1.0)
    assert main.reads == 0
    reader.request(main.read, accept_late=False)
    main.resume(1.0)
    assert main.reads == 1

    reader = MainThreadReader(main.call_soon, clock=lambda: main.now)
    reader.request(main.read, accept_late=True)
    main.resume(1000.0)
    assert main.reads == 2


def test_a_blocked_main_thread_is_asked_once(
    main: BusyMainThread, reader: MainThreadReader
) -> None:
    """Requests that get no answer do not pile up."""
    for _ in range(100):
        reader.request(main.read, accept_late=True)

    assert len(main.requested) == 1


def test_the_training_thread_stands_in_for_a_silent_main_thread(
    main: BusyMainThread, reader: MainThreadReader
) -> None:
    """Where other threads train, a step's end does the read, once; a late main thread adds none."""
    reader.request(main.read, accept_late=False)
    reader.at_step()
    assert main.reads == 0
    main.now += SILENT_SECONDS * 1.01
    reader.at_step()
    reader.at_step()
    main.resume(0.0)

    assert main.reads == 1


def test_a_forked_child_does_not_read_for_its_parent(
    main: BusyMainThread, reader: MainThreadReader
) -> None:
    """A request to the parent does nothing in a child that inherited it."""
    reader.request(main.read, accept_late=True)
    child = os.fork()
    if child == 0:
        main.resume(0.0)
        os._exit(main.reads)

    assert os.waitpid(child, 0)[1] == 0


def test_the_end_of_the_process_does_not_wait_for_the_main_thread() -> None:
    """`stop` frees a sampler that waits for the main thread, and nothing is read afterwards."""
    requested: list[Callable[[], None]] = []
    reads: list[int] = []
    reader = MainThreadReader(requested.append)
    waiting = threading.Thread(
        target=lambda: reader.request(lambda: reads.append(1), accept_late=True)
    )
    waiting.start()
    while not requested:
        time.sleep(WAIT_SECONDS / 100)
    reader.stop()
    waiting.join()
    requested[0]()

    assert not reads


def test_a_main_thread_that_takes_no_more_calls_is_asked_again() -> None:
    """After the interpreter refused a call, the next request is made all the same."""
    refusals = [RuntimeError("the interpreter has too many pending calls")]

    def call_soon(call: Callable[[], None]) -> None:
        if refusals:
            raise refusals.pop()
        call()

    reader, reads = MainThreadReader(call_soon), list[int]()
    with pytest.raises(RuntimeError):
        reader.request(lambda: reads.append(1), accept_late=True)

    assert reader.request(lambda: reads.append(2), accept_late=True)
    assert reads == [2]


def test_calls_run_in_the_main_thread_between_two_bytecodes() -> None:
    """A call from another thread interrupts the main thread's Python code and runs once."""
    calls, seen = PendingCalls(lambda entry: entry), list[threading.Thread]()

    def add_calls() -> None:
        for _ in range(3):
            calls.add(lambda: seen.append(threading.current_thread()))

    other = threading.Thread(target=add_calls)
    other.start()
    while len(seen) < 3:
        pass
    other.join()

    assert [threading.main_thread()] * 3 == seen


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["ctrl-c", "sys.exit"])
def test_what_a_signal_handler_raises_during_a_call_reaches_the_script(
    error: BaseException,
) -> None:
    """Ctrl-C, or sys.exit in a handler, is raised in the script as it would be without the SDK."""
    calls = PendingCalls(lambda entry: entry)

    def interrupt() -> None:
        raise error

    def script() -> None:
        calls.add(interrupt)
        while True:
            pass

    with pytest.raises(type(error)) as raised:
        script()

    assert error is raised.value


def test_raise_after_waits_for_the_callback_to_end() -> None:
    """However long a callback that must not raise takes, Ctrl-C is raised right after it."""
    calls, events = PendingCalls(lambda entry: entry), list[str]()
    error = KeyboardInterrupt()

    def must_not_raise() -> None:
        if not events:
            calls.raise_after(error, must_not_raise.__code__)
        for _ in range(1000):
            pass
        events.append("ended")

    def script() -> None:
        while True:
            must_not_raise()

    with pytest.raises(KeyboardInterrupt) as raised:
        script()

    assert error is raised.value
    assert events == ["ended"]


def test_a_call_close_to_the_recursion_limit_raises_nothing() -> None:
    """A script that is as deep as Python allows for one more call does not see a RecursionError."""
    calls = PendingCalls(lambda entry: entry)

    def leaf() -> None:
        pass

    def deeper() -> None:
        leaf()

    def descend() -> None:
        try:
            leaf()
            calls.add(deeper)
        except RecursionError:
            return
        leaf()
        with contextlib.suppress(RecursionError):
            descend()
        leaf()

    descend()


FORKING = """
import os, threading
from torchmem.sdk.safety.main_thread import PendingCalls

calls, ran = PendingCalls(lambda entry: entry), []
waits = threading.Lock()
waits.acquire()

def fork_from_a_thread():
    # The main thread is inside a call to C, and the pending call comes to the child.
    calls.add(lambda: ran.append(os.getpid()))
    child = os.fork()
    for _ in range(1000):
        pass
    if child == 0:
        os._exit(len(ran))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    waits.release()

threading.Thread(target=fork_from_a_thread).start()
waits.acquire()
for _ in range(1000):
    pass
print(ran == [os.getpid()])
"""


def test_a_forked_child_runs_no_call_of_its_parent() -> None:
    """A call that waits for the main thread runs there once, and never in a child of fork."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "0\nTrue\n"), done.stderr
