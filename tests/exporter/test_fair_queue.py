"""The thread for costly work that any client can ask for."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest

from torchmem.exporter.web.fair_queue import BusyError, FairQueue


def test_clients_take_turns() -> None:
    """A client that asks once is served next, however many requests of others wait."""
    served, gate = list[str](), threading.Event()

    def work(client: str) -> None:
        assert gate.wait(60)
        served.append(client)

    async def ask() -> None:
        queue = FairQueue("test", 8)
        asked = [
            asyncio.ensure_future(queue.run(client, partial(work, client)))
            for client in [*"aaaaa", *"bbbbb", "honest"]
        ]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*asked)

    asyncio.run(ask())

    assert [*"ab", "honest", *"abababab"] == served


def test_one_client_waits_only_so_often() -> None:
    """Requests beyond the limit are refused, those of other clients are not."""

    async def ask() -> tuple[int, str]:
        queue, gate = FairQueue("test", 2), threading.Event()
        greedy = [asyncio.ensure_future(queue.run("greedy", gate.wait)) for _ in range(5)]
        await asyncio.sleep(0)
        other = asyncio.ensure_future(queue.run("other", lambda: "answer"))
        gate.set()
        answers = await asyncio.gather(*greedy, return_exceptions=True)
        return sum(isinstance(answer, BusyError) for answer in answers), await other

    assert asyncio.run(ask()) == (2, "answer")


def test_the_thread_rests() -> None:
    """After a long function the next one begins when the first has had its share of the time."""

    async def ask() -> list[float]:
        queue = FairQueue("test", 8, max_share=0.25)
        await queue.run("a", lambda: time.sleep(0.1))
        ended = time.monotonic()
        return [ended, await queue.run("b", time.monotonic)]

    ended, began = asyncio.run(ask())

    assert began - ended >= 0.25


def test_an_error_reaches_the_one_who_asked() -> None:
    """And the next function runs."""

    async def ask() -> str:
        queue = FairQueue("test", 8)
        with pytest.raises(ZeroDivisionError):
            await queue.run("a", lambda: 1 // 0)
        return await queue.run("a", lambda: "next")

    assert asyncio.run(ask()) == "next"
