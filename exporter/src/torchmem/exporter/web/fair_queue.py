"""A thread for costly work that any client can ask for, shared fairly by the clients.

In the order of their arrival, a client that sends many wrong passwords, or asks for many memory
maps, would make all others wait for hours: a check of a password takes up to seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

MAX_REMEMBERED_CLIENTS = 1024


def in_thread(thread: Executor, function: Callable[[], T]) -> asyncio.Task[T]:
    """Run a function in a thread. The task ends with the event loop, and then nothing is logged."""

    async def call() -> T:
        return await asyncio.get_running_loop().run_in_executor(thread, function)

    return asyncio.create_task(call())


class BusyError(Exception):
    """Too many functions of this client are waiting."""


class FairQueue:
    """Runs functions one at a time in a thread of its own, so that they take at most one core.

    The client that was served least recently comes next; a client that was never served comes
    before all others. A client's own functions run in their order, and at most `max_waiting` of
    them wait. `max_share` is the largest share of the time that functions run: after a long one the
    thread rests, so that scrapes get the interpreter.
    """

    def __init__(self, name: str, max_waiting: int, max_share: float = 1.0) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._max_waiting, self._max_share = max_waiting, max_share
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._served: OrderedDict[str, int] = OrderedDict()
        self._number = count(1)
        self._is_busy = False

    async def run(self, client: str, function: Callable[[], T]) -> T:
        """Return the function's result; raise BusyError if too many of this client wait."""
        waiting = self._waiting.setdefault(client, deque())
        if len(waiting) >= self._max_waiting:
            raise BusyError
        turn = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:  # with the request
            if turn in waiting:
                self._remove(client, turn)
            else:
                self._resume()
            raise
        running = in_thread(self._thread, function)
        running.add_done_callback(partial(self._end, time.monotonic()))
        return await asyncio.shield(running)

    def _start_next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        client = min(self._waiting, key=lambda client: self._served.get(client, 0))
        turn = self._waiting[client][0]
        self._remove(client, turn)
        self._note_served(client)
        turn.set_result(None)

    def _remove(self, client: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting[client]
        waiting.remove(turn)
        if not waiting:
            del self._waiting[client]

    def _note_served(self, client: str) -> None:
        self._served[client] = next(self._number)
        self._served.move_to_end(client)
        if len(self._served) > MAX_REMEMBERED_CLIENTS:
            self._served.popitem(last=False)

    def _end(self, started: float, _: asyncio.Task[Any]) -> None:
        rest = (time.monotonic() - started) * (1 / self._max_share - 1)
        asyncio.get_running_loop().call_later(rest, self._resume)

    def _resume(self) -> None:
        self._is_busy = False
        self._start_next()
