"""Replays settings in parallel, in forked processes that share the recording's memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_THREADS = Path("/proc/self/task")
_calls: Sequence[Callable[[], Any]] = ()
"""What the processes inherit; a recording is too large to be sent to them."""


def in_processes(calls: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Yield the results of the calls in their order; they run in one process for each core.

    If a process dies, this process makes the remaining calls. It makes all of them where a fork is
    not safe: with other threads, and outside of Linux.
    """
    global _calls  # noqa: PLW0603 - for the processes
    count, done = min(len(calls), _cores()), 0
    if count < 2 or not _can_fork():
        yield from (call() for call in calls)
        return
    _calls = calls
    try:
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(count, fork, initializer=_end_at_interrupt) as pool:
            for result in pool.map(_call, range(len(calls))):
                yield result
                done += 1
    except BrokenProcessPool:
        yield from (call() for call in calls[done:])


def _end_at_interrupt() -> None:
    # The terminal sends Ctrl-C to all processes of the group; only the parent should report it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _call(number: int) -> Any:
    return _calls[number]()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _can_fork() -> bool:
    try:
        return len(list(_THREADS.iterdir())) == 1 and not multiprocessing.current_process().daemon
    except OSError:
        return False
