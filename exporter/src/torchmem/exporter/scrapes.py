"""Scrapes: one collection for all who come while it runs, each answered before its own patience ends."""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from torchmem.exporter.rundir import Published
from torchmem.exporter.web.negotiation import Format, choose_format, takes_gzip

MAX_CONCURRENT_SCRAPES = 16
MAX_CONCURRENT_SCRAPES_OF_CLIENT = 8
MARGIN_SECONDS = 0.5
PATIENCE_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
_GZIP_LEVEL = (
    1  # exposition text shrinks twentyfold already; more would cost CPU time on every scrape
)
_GZIP_BYTES = 1000

T = TypeVar("T")


class Collector(Protocol):
    """What the server serves; the calls come from several threads."""

    def collect(self) -> Sequence[Metric]:
        """All families, fresh."""

    def known(self) -> Sequence[Metric]:
        """Those that the collection which runs now has already, at once."""

    def published(self) -> Sequence[Published]:
        """Every process of the run directory; raises OSError when it cannot be read."""


class Shared(Generic[T]):
    """Calls a function in a thread; who asks while it runs gets what that run gives."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._running: asyncio.Task[T] | None = None

    async def get(self, seconds: float | None = None) -> T:
        """The result; raises TimeoutError after `seconds`, and the run goes on for the others."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(asyncio.to_thread(self._call))
        running = self._running
        done, _ = await asyncio.wait({running}, timeout=seconds)
        if not done:
            raise TimeoutError
        return running.result()


class Collection:
    """Families as an encoder of prometheus_client wants them; each encoding is made once, in a thread."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families
        self._bodies: dict[tuple[Format, bool], asyncio.Future[bytes]] = {}

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._families

    async def body(self, wanted: Format, *, compressed: bool) -> tuple[bytes, bool]:
        """The exposition and whether it is compressed; a short one never is."""
        plain = await self._once((wanted, False), lambda: asyncio.to_thread(wanted.encode, self))
        if not compressed or len(plain) < _GZIP_BYTES:
            return plain, False
        return await self._once(
            (wanted, True), lambda: asyncio.to_thread(gzip.compress, plain, _GZIP_LEVEL)
        ), True

    async def _once(self, key: tuple[Format, bool], make: Callable[[], Awaitable[bytes]]) -> bytes:
        if key not in self._bodies:
            self._bodies[key] = asyncio.ensure_future(make())
        return await asyncio.shield(self._bodies[key])


class Scrapes:
    """Answers /metrics and /-/ready."""

    def __init__(self, collector: Collector) -> None:
        self._whole = Shared(lambda: Collection(collector.collect()))
        self._known = Shared(lambda: Collection(collector.known()))
        self._waiting = Counter[str]()
        self._collected = False

    async def collection(self, seconds: float | None = None) -> Collection:
        """Everything, or what is known when `seconds` are over; the collection itself goes on for others."""
        try:
            collection = await self._whole.get(seconds)
        except TimeoutError:
            return await self._known.get()
        self._collected = True
        return collection

    async def metrics(self, request: Request) -> Response:
        """The exposition in the format that the client prefers."""
        client = request.client.host if request.client else ""
        if (
            self._waiting.total() >= MAX_CONCURRENT_SCRAPES
            or self._waiting[client] >= MAX_CONCURRENT_SCRAPES_OF_CLIENT
        ):
            return PlainTextResponse(
                "Too many scrapes at once: try again later.\n", status_code=503
            )
        self._waiting[client] += 1
        try:
            return await self._exposition(request)
        finally:
            self._waiting[client] -= 1
            self._waiting += Counter()

    async def ready(self, _: Request) -> Response:
        """200 once a collection has ended."""
        if self._collected:
            return PlainTextResponse("Ready.\n")
        return PlainTextResponse("Not ready: the first collection is not done.\n", status_code=503)

    async def _exposition(self, request: Request) -> Response:
        collection = await self.collection(patience(request.headers.get(PATIENCE_HEADER)))
        wanted = choose_format(request.headers.get("accept", ""))
        gzipped = takes_gzip(request.headers.get("accept-encoding", ""))
        body, compressed = await collection.body(wanted, compressed=gzipped)
        headers = {"Content-Type": wanted.content_type, "Vary": "Accept, Accept-Encoding"}
        return Response(
            body, headers=headers | ({"Content-Encoding": "gzip"} if compressed else {})
        )


def patience(header: str | None) -> float | None:
    """Seconds until a scraper must have its answer on the way: its timeout less a margin, None when it names none."""
    try:
        timeout = float(header or "")
    except ValueError:
        return None
    return max(timeout - MARGIN_SECONDS, timeout / 2) if 0 < timeout < 1e6 else None
