"""Replays settings in parallel, in forked processes that share the recording's memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_THREADS = Path("/proc/self/task")


def in_processes(calls: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Yield the results of the calls in their order; they run in one process for each core.

    What a process did not return, because it died or raised, this process calls itself. It calls
    everything itself where a fork is not safe: with other threads, and outside of Linux.
    """
    count = min(len(calls), _cores())
    if count < 2 or not _can_fork():
        yield from (call() for call in calls)
        return
    sys.stdout.flush()
    context = multiprocessing.get_context("fork")
    following = context.Value("i", 0)
    ends: list[Connection] = []
    workers = []
    try:
        for _ in range(count):
            receiver, sender = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(calls, following, sender), daemon=True)
            worker.start()
            sender.close()
            workers.append(worker)
            ends.append(receiver)
        yield from _ordered(calls, ends)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
        for end in ends:
            end.close()


def _ordered(calls: Sequence[Callable[[], T]], ends: Sequence[Connection]) -> Iterator[T]:
    found: dict[int, T] = {}
    for number, call in enumerate(calls):
        while number not in found and any(not end.closed for end in ends):
            found.update(_received(ends))
        yield found.pop(number) if number in found else call()


def _received(ends: Sequence[Connection]) -> Iterator[tuple[int, Any]]:
    """Yield what has arrived; close the pipes of processes that ended."""
    ready = wait([end for end in ends if not end.closed])
    for end in ends:
        if end in ready:
            try:
                received = end.recv()
            except EOFError:
                end.close()
                continue
            yield received


def _work(calls: Sequence[Callable[[], T]], following: Any, sender: Connection) -> None:
    """Make the next call that no process has begun, until there is none."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        with following.get_lock():
            number, following.value = following.value, following.value + 1
        if number >= len(calls):
            return
        try:
            result = calls[number]()
        except Exception:  # noqa: BLE001 - the parent makes this call again, and raises
            os._exit(1)
        sender.send((number, result))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _can_fork() -> bool:
    try:
        return len(list(_THREADS.iterdir())) == 1 and not multiprocessing.current_process().daemon
    except OSError:
        return False
