"""What each protection of the script is for: the harm that the same program does without it."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

import pytest

from torchmem.sample.native_threads import Lock
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.safety.interruptions import call_if_free, is_interruption, shield

Judge = Callable[[BaseException], bool]


class ScriptError(Exception):
    """An exception of the script's own."""


def arrives(judge: Judge, interrupt: Callable[[], None]) -> bool:
    """Return whether what interrupts the SDK's code reaches the script."""
    errors, deadline = Errors(judge), time.monotonic() + 10.0
    try:
        with errors.suppress("stats"):
            interrupt()
            while time.monotonic() < deadline:
                pass
    except (ScriptError, ValueError):
        return True
    assert errors.counts["stats"] == 1
    return False


def fail(*_: object) -> NoReturn:
    """A signal handler that raises."""
    raise ScriptError


@pytest.mark.parametrize(
    ("judge", "expected"),
    [(is_interruption, True), (lambda error: not isinstance(error, Exception), False)],
    ids=["protected", "unprotected"],
)
def test_a_timeout_is_lost_with_the_sdks_errors(judge: Judge, *, expected: bool) -> None:
    """Without `is_interruption`, a timeout that comes in the SDK's code ends nothing."""
    previous = signal.signal(signal.SIGALRM, fail)
    try:
        found = arrives(judge, lambda: signal.setitimer(signal.ITIMER_REAL, 0.01) and None)
    finally:
        signal.signal(signal.SIGALRM, previous)

    assert found == expected


@pytest.mark.parametrize(
    ("judge", "expected"),
    [(is_interruption, True), (partial(is_interruption, asynchronous=False), False)],
    ids=["protected", "unprotected"],
)
def test_an_asynchronous_timeout_is_lost(judge: Judge, *, expected: bool) -> None:
    """Without a look at the instruction, an exception of another thread counts as the SDK's."""
    thread = threading.get_ident()

    def interrupt() -> None:
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        arguments = ctypes.c_ulong(thread), ctypes.py_object(ValueError)
        threading.Timer(0.01, raise_in, arguments).start()

    assert arrives(judge, interrupt) == expected


def call_with_try(lock: Lock, call: Callable[[], None]) -> None:
    """Do what `call_if_free` does, as it is usually written."""
    if lock.acquire(blocking=False):
        try:
            call()
        finally:
            lock.release()


@pytest.mark.parametrize(
    ("call_locked", "stays_free"),
    [(call_if_free, True), (call_with_try, False)],
    ids=["protected", "unprotected"],
)
def test_a_lock_stays_held(
    call_locked: Callable[[Lock, Callable[[], None]], None], *, stays_free: bool
) -> None:
    """A timeout between `acquire` and `try` leaves the lock held, and everything else waits."""
    lock = Lock()
    previous = signal.signal(signal.SIGALRM, fail)
    try:
        for _ in range(2000):
            with suppress(ScriptError):
                signal.setitimer(signal.ITIMER_REAL, 20e-6)
                while True:
                    call_locked(lock, lambda: None)
            if lock.locked():
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)

    assert lock.locked() is not stays_free


def test_a_script_close_to_the_recursion_limit_gets_an_error() -> None:
    """A function of the SDK needs more of the stack than the script's own call would."""

    def work(depth: int = 20) -> None:
        if depth:
            work(depth - 1)

    def near_the_limit(call: Callable[[], object]) -> bool:
        """Call where 5 more frames fit; return whether it raises no RecursionError."""
        found = []

        def descend() -> int:
            try:
                left = descend()
            except RecursionError:
                return 0
            if left == 5:
                try:
                    call()
                except RecursionError:
                    found.append(False)
                else:
                    found.append(True)
            return left + 1

        descend()
        return found == [True]

    assert not near_the_limit(work)
    assert near_the_limit(shield(work))


def run(program: str, *arguments: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)


# A stream's lock is held by a thread that reads from it, as the allocator's is by one that waits
# for the driver; `PyDLL` keeps the GIL, as PyTorch does when it reads the statistics.
HANGING_DRIVER = """
import ctypes, os, sys, threading, time
from torchmem.sdk.safety.main_thread import MainThreadReader, PendingCalls

waiting, holding_gil = ctypes.CDLL(None), ctypes.PyDLL(None)
waiting.fdopen.restype = ctypes.c_void_p
receiving, sending = os.pipe()
stream = ctypes.c_void_p(waiting.fdopen(receiving, b"r"))
soon = {"main": PendingCalls(lambda entry: entry).add, "background": lambda call: call()}
reader = MainThreadReader(soon[sys.argv[1]])
asked, has_read = threading.Event(), threading.Event()
sys.setswitchinterval(1000)  # a thread runs until it waits

def read():
    holding_gil.ftell(stream)
    print("read", flush=True)
    has_read.set()

def background():
    while not holding_gil.ftrylockfile(stream):  # until the main thread is inside fgetc
        holding_gil.funlockfile(stream)
        time.sleep(0.01)
    asked.set()
    reader.request(read, accept_late=True)

def other():
    asked.wait()
    print("alive", flush=True)
    os.write(sending, b"x")

for run in (background, other):
    threading.Thread(target=run, daemon=True).start()
waiting.fgetc(stream)
print("returned", flush=True)
has_read.wait()
"""


def test_a_read_stops_every_thread_while_the_driver_hangs() -> None:
    """In the background thread it waits with the GIL; the main thread reads after the call."""
    done = run(HANGING_DRIVER, "main")
    assert sorted(done.stdout.split()) == ["alive", "read", "returned"], done.stderr

    with pytest.raises(subprocess.TimeoutExpired) as hung:
        run(HANGING_DRIVER, "background", seconds=5.0)
    assert not hung.value.stdout


FAILING_EXIT = """
import atexit, sys
from torchmem.sdk.oom.ending import UncaughtErrors, last_error
from torchmem.sdk.safety.errors import Errors

uncaught = UncaughtErrors(Errors())
if sys.argv[1] == "wrapped":
    uncaught.begin()
atexit.register(lambda: print(uncaught.ending(last_error())))
sys.exit(1)
"""


@pytest.mark.parametrize(("exits", "ending"), [("wrapped", "failed"), ("plain", "exited")])
def test_a_rank_that_gives_up_seems_to_have_finished(exits: str, ending: str) -> None:
    """Without the wrapper of `sys.exit`, nothing in the process tells an exit code of 1."""
    assert run(FAILING_EXIT, exits).stdout == f"{ending}\n"


TERMINATED = """
import os, signal, sys
from torchmem.sdk.safety.sigterm import SigtermFlush

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if sys.argv[1] == "wrapped":
    SigtermFlush(lambda: print("published", flush=True)).install()
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(("handler", "output"), [("wrapped", "published\n"), ("plain", "")])
def test_the_last_state_is_not_published(handler: str, output: str) -> None:
    """A handler that ends the process with `os._exit` skips all that runs at the exit."""
    assert run(TERMINATED, handler).stdout == output
