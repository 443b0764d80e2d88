"""The web application: one collection shared by simultaneous scrapes, health, readiness and a landing page."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from torchmem.exporter.landing import page

MAX_CONCURRENT_SCRAPES = 16
_GZIP_LEVEL = 1  # exposition text shrinks twentyfold already; more would cost CPU time on every scrape
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Collector(Protocol):
    """What the server serves."""

    def collect(self) -> Sequence[Metric]:
        """All families, fresh."""


class _Families:
    """Families already collected, as an encoder of prometheus_client wants them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _Scrapes:
    """Runs collections outside the event loop; a scrape that comes while one runs waits for that one."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._running: asyncio.Task[Sequence[Metric]] | None = None
        self.waiting = 0
        self.done_once = False

    async def families(self) -> Sequence[Metric]:
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(asyncio.to_thread(self._collector.collect))
        self.waiting += 1
        try:
            families = await asyncio.shield(self._running)
        finally:
            self.waiting -= 1
        self.done_once = True
        return families

    async def metrics(self, request: Request) -> Response:
        if self.waiting >= MAX_CONCURRENT_SCRAPES:
            return PlainTextResponse("Too many scrapes at once: try again later.\n", status_code=503)
        families = await self.families()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = await asyncio.to_thread(encode, _Families(families))
        return Response(body, headers={"Content-Type": content_type})

    async def ready(self, _: Request) -> Response:
        if self.done_once:
            return PlainTextResponse("Ready.\n")
        return PlainTextResponse("Not ready: the first collection is not done.\n", status_code=503)


def application(collector: Collector) -> Starlette:
    """The ASGI application; it starts the first collection itself, so that it becomes ready without a scrape."""
    scrapes = _Scrapes(collector)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        first = asyncio.create_task(scrapes.families())
        yield
        first.cancel()

    routes = [
        Route("/metrics", scrapes.metrics),
        Route("/-/healthy", _healthy),
        Route("/-/ready", scrapes.ready),
        Route("/", _landing),
    ]
    gzip = Middleware(GZipMiddleware, minimum_size=1000, compresslevel=_GZIP_LEVEL)
    return Starlette(routes=routes, middleware=[gzip], lifespan=lifespan)


async def _healthy(_: Request) -> Response:
    return PlainTextResponse("Healthy.\n")


async def _landing(_: Request) -> Response:
    return HTMLResponse(page(version("torchmem"), platform.node()), headers=_PAGE_HEADERS)
