"""The web application: its paths and what stands before them."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from torchmem.exporter.discovery import HOST, own_addresses, target_groups
from torchmem.exporter.landing import page
from torchmem.exporter.rundir import Published
from torchmem.exporter.scrapes import Collector, Scrapes, Shared
from torchmem.exporter.web.access import Access
from torchmem.exporter.web.config import WebConfig

_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def application(collector: Collector, config: Callable[[], WebConfig] = WebConfig) -> Starlette:
    """The ASGI application; it starts the first collection itself, so that it becomes ready without a scrape."""
    scrapes = Scrapes(collector)
    published = Shared(lambda: (collector.published(), own_addresses()))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        first = asyncio.create_task(scrapes.collection())
        yield
        first.cancel()

    routes = [
        Route("/metrics", scrapes.metrics),
        Route("/sd", partial(_discovery, published)),
        Route("/-/healthy", _healthy),
        Route("/-/ready", scrapes.ready),
        Route("/", _landing),
    ]
    served = Starlette(
        routes=routes, middleware=[Middleware(Access, config=config)], lifespan=lifespan
    )
    served.router.redirect_slashes = (
        False  # it would build an address from the client's Host header
    )
    return served


async def _discovery(
    published: Shared[tuple[Sequence[Published], set[str]]], request: Request
) -> Response:
    """All or nothing: on an error Prometheus keeps the list it has."""
    try:
        processes, addresses = await published.get()
    except OSError as error:
        return PlainTextResponse(
            f"The run directory cannot be read: {error.strerror}.\n", status_code=500
        )
    asked_from = request.client.host if request.client else ""
    return JSONResponse(
        target_groups(processes, request.headers.get("host", ""), asked_from, addresses)
    )


async def _healthy(_: Request) -> Response:
    return PlainTextResponse("Healthy.\n")


async def _landing(request: Request) -> Response:
    host = request.headers.get("host", "")
    address = host if HOST.fullmatch(host) else platform.node()
    secure = request.scope["scheme"] == "https"
    return HTMLResponse(
        page(version("torchmem"), platform.node(), address, secure=secure), headers=_PAGE_HEADERS
    )
