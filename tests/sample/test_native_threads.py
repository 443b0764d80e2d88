"""Threads and locks that no monkey patch replaces."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from support.threads import thread_names
from support.waiting import until

from torchmem.sample.native_threads import Lock, Thread, ident, is_main_thread, sleep
from torchmem.sdk.safety.interruptions import call_holding


def test_a_thread_runs_and_is_named() -> None:
    """A thread calls its function once, under its name; `join` ends with it."""
    ended, seen = Lock(), list[tuple[int, bool]]()
    ended.acquire()

    def run() -> None:
        seen.append((ident(), is_main_thread()))
        ended.acquire()

    thread = Thread(run, "torchmem-a-long-name")
    assert not thread.is_alive()
    thread.start()
    thread.start()
    until(lambda: "torchmem-a-long" in thread_names() and seen)
    thread.join(0.01)
    assert (thread.is_alive(), thread.is_current()) == (True, False)
    ended.release()
    thread.join(60)

    assert not thread.is_alive()
    assert [found for _, found in seen] == [False]
    assert is_main_thread()


def test_a_thread_that_cannot_start_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed start nothing waits for the thread, and the next start succeeds."""
    ran, thread = list[int](), Thread(lambda: ran.append(1), "torchmem")
    with monkeypatch.context() as patch:
        patch.setattr("torchmem.sample.native_threads._thread.start_new_thread", _fail)
        with pytest.raises(RuntimeError):
            thread.start()
    thread.join(60)
    assert not thread.is_alive()
    thread.start()
    until(lambda: ran and not thread.is_alive())


def _fail(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_does_not_wait_for_itself() -> None:
    """A signal handler does not wait for a lock that the code holds which it interrupts."""
    lock, done = Lock(), list[bool]()

    def inner() -> None:
        call_holding(lock, 10_000.0, lambda: done.append(True))

    call_holding(lock, 1.0, inner)
    other = threading.Thread(target=inner)
    other.start()
    other.join()
    assert (done, lock.owner, lock.locked()) == ([True, True], None, False)


def test_sleep_waits() -> None:
    """`sleep` takes at least as long as it says."""
    started = time.monotonic()
    sleep(0.05)
    assert time.monotonic() - started >= 0.05


PATCHED = """
import _thread, functools, select, socket, subprocess, sys, threading, time
called = []
def watch(module, name):
    function = getattr(module, name)
    @functools.wraps(function)
    def watched(*arguments, **keywords):
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("torchmem.") and not caller.startswith("torchmem.simulator."):
            called.append((caller, name))
        return function(*arguments, **keywords)
    setattr(module, name, watched)
for module, names in [
    (_thread, ["start_new_thread", "allocate_lock", "RLock"]),
    (threading, ["Lock", "RLock", "Event", "Condition", "enumerate"]),
    (threading.Thread, ["start", "join"]),
    (time, ["sleep"]), (select, ["poll", "select"]), (socket, ["getaddrinfo"]),
    (subprocess, ["Popen", "run"]),
]:
    for name in names:
        watch(module, name)

from tempfile import mkdtemp
from torchmem.sdk import instrument
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.device_memory import SimulatedGpu
from torchmem.simulator.errors import OutOfMemoryError

allocator = DeviceCachingAllocator(SimulatedGpu(1 << 30, context_bytes=0))
backend = SimulatedBackend([allocator], initialized=False)
session = instrument(
    backend=backend, run_dir=mkdtemp(), interval=1e-9, port=0, release="hooks=0.5,cache=0.3"
)
backend.init()
for _ in range(50):
    backend.step()
try:
    allocator.malloc(2 << 30)
except OutOfMemoryError:
    pass
session.close()
print(session.newest.steps.count, session.newest.ended, sum(session.errors.counts.values()))
print(called)
"""


def test_the_sdk_uses_nothing_that_is_patched() -> None:
    """From CUDA's start to the end, the SDK calls no function that gevent replaces."""
    done = subprocess.run(
        [sys.executable, "-c", PATCHED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "50 exited 0\n[]\n"), done.stderr
