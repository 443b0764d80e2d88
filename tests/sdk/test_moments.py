"""When the sampler's reads happen: at random moments of the main thread, and never where waiting could hurt."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import pytest

from torchmem.sdk._main_thread import (
    LEAVING_SECONDS,
    MOST_MISSES,
    PATIENCE_SECONDS,
    SILENT_SECONDS,
    WAIT_SECONDS,
    Moments,
    PendingCalls,
    raise_soon,
)


class BusyMain:
    """A main thread that comes back to Python only when the test lets it; time passes only when it is told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: deque[Callable[[], None]] = deque()
        self.read = 0

    def call_soon(self, call: Callable[[], None]) -> None:
        self.asked.append(call)

    def come_back(self, after: float) -> None:
        self.now += after
        while self.asked:
            self.asked.popleft()()

    def count(self) -> None:
        self.read += 1


@pytest.fixture
def main() -> BusyMain:
    return BusyMain()


@pytest.fixture
def moments(main: BusyMain) -> Moments:
    return Moments(main.call_soon, clock=lambda: main.now)


def test_a_moment_after_a_long_call_is_dropped(main: BusyMain, moments: Moments) -> None:
    """The end of a backward pass is no random moment: a late main thread reads nothing."""
    assert not moments.ask(main.count, patient=False)
    main.come_back(2 * PATIENCE_SECONDS)

    assert 0 == main.read


def test_a_late_moment_is_better_than_none(main: BusyMain, moments: Moments) -> None:
    """Where no moment was punctual a few times, or no step comes, the next late one counts."""
    for _ in range(MOST_MISSES):
        moments.ask(main.count, patient=False)
        main.come_back(1.0)
    assert 0 == main.read
    moments.ask(main.count, patient=False)
    main.come_back(1.0)
    assert 1 == main.read

    moments = Moments(main.call_soon, clock=lambda: main.now)
    moments.ask(main.count, patient=True)
    main.come_back(1000.0)
    assert 2 == main.read


def test_a_blocked_main_thread_is_asked_once(main: BusyMain, moments: Moments) -> None:
    """Asking again and again while nobody answers queues nothing."""
    for _ in range(100):
        moments.ask(main.count, patient=True)

    assert 1 == len(main.asked)


def test_the_training_thread_stands_in_for_a_silent_main_thread(
    main: BusyMain, moments: Moments
) -> None:
    """Where other threads train, the end of a step does the read, once; a late main thread adds none."""
    moments.ask(main.count, patient=False)
    moments.at_step()
    assert 0 == main.read
    main.now += SILENT_SECONDS * 1.01
    moments.at_step()
    moments.at_step()
    main.come_back(0.0)

    assert 1 == main.read


def test_a_forked_child_does_not_read_for_its_parent(main: BusyMain, moments: Moments) -> None:
    """What was asked of the parent does nothing in a child that inherited it."""
    moments.ask(main.count, patient=True)
    child = os.fork()
    if child == 0:
        main.come_back(0.0)
        os._exit(main.read)

    assert 0 == os.waitpid(child, 0)[1]


def test_the_end_of_the_process_waits_for_nobody() -> None:
    """`stop` lets the sampler go on although the main thread never came, and nothing is read afterwards."""
    asked: list[Callable[[], None]] = []
    reads: list[int] = []
    moments = Moments(asked.append)
    waiting = threading.Thread(target=lambda: moments.ask(lambda: reads.append(1), patient=True))
    waiting.start()
    while not asked:
        time.sleep(WAIT_SECONDS / 100)
    moments.stop()
    waiting.join()
    asked[0]()

    assert not reads


def test_a_main_thread_that_takes_no_more_calls_is_asked_again() -> None:
    """When the interpreter refuses a call, the next one is asked for all the same."""
    refusals = [RuntimeError("the interpreter has too many pending calls")]

    def call_soon(call: Callable[[], None]) -> None:
        if refusals:
            raise refusals.pop()
        call()

    moments, reads = Moments(call_soon), list[int]()
    with pytest.raises(RuntimeError):
        moments.ask(lambda: reads.append(1), patient=True)

    assert moments.ask(lambda: reads.append(2), patient=True)
    assert [2] == reads


def test_calls_run_in_the_main_thread_between_two_bytecodes() -> None:
    """A call asked for by another thread interrupts the main thread's Python code, and every one runs once."""
    calls, seen = PendingCalls(lambda entry: entry), list[threading.Thread]()

    def ask() -> None:
        for _ in range(3):
            calls.add(lambda: seen.append(threading.current_thread()))

    other = threading.Thread(target=ask)
    other.start()
    while len(seen) < 3:
        pass
    other.join()

    assert [threading.main_thread()] * 3 == seen


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["ctrl-c", "sys.exit"])
def test_what_a_signal_handler_raises_in_our_code_is_still_the_scripts(
    error: BaseException,
) -> None:
    """Ctrl-C, or sys.exit in a handler, that arrives while a call runs is raised in the script, as without us."""
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


def test_what_is_raised_soon_waits_for_its_function_to_end() -> None:
    """However long the function takes that C called and that must not raise, Ctrl-C comes behind it."""
    ended: list[bool] = []

    def must_not_raise() -> None:
        raise_soon(KeyboardInterrupt())
        for _ in range(5):
            time.sleep(LEAVING_SECONDS)
        ended.append(True)

    def script() -> None:
        must_not_raise()
        while True:
            pass

    with pytest.raises(KeyboardInterrupt):
        script()

    assert ended
