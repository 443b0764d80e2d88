"""The web application: /metrics, /sd, the probes, the live page and its API, the list of links."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial
from html import escape
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from torchmem.exporter.discovery import ServiceDiscovery
from torchmem.exporter.live.api import LiveApi
from torchmem.exporter.live.map_api import MapApi
from torchmem.exporter.live.page import page, static_file
from torchmem.exporter.live.report_api import ReportApi
from torchmem.exporter.live.states import RankIndex, States
from torchmem.exporter.scrapes import Collector, Scrapes
from torchmem.exporter.web.access import REPORT_PATH, Access
from torchmem.exporter.web.config import WebConfig
from torchmem.exporter.web.fair_queue import FairQueue

_LINKS = ("/metrics", "/sd", "/-/healthy", "/-/ready")
_PAGE_ROUTES = (Route("/", page), Route("/static/{digest}/{name}", static_file))
_STATE_SECONDS = 5.0
"""How long a client of the state waits for a driver that hangs."""
_MAX_WAITING = 8  # requests of one client about ranks and maps
_LIVE_SHARE = 0.25
"""The largest share of the time that such requests take, however many there are."""
_GIVE_BACK_AFTER_SECONDS = (0.0, 60.0)
_LINKS_HEADERS = {"Content-Security-Policy": "default-src 'none'"}


def application(
    collector: Collector,
    config: Callable[[], WebConfig] = WebConfig,
    *,
    web_ui: bool = True,
    allowed_hosts: Collection[str] = (),
    give_back: Callable[[], None] = lambda: None,
) -> Starlette:
    """Return the ASGI application; `web_ui`: whether `/` is the live page.

    It starts the first collection itself, so that it becomes ready without a scrape. `give_back`
    gives back memory that only the start needs: it is called after the first collection, and again
    after the first scrapes.
    """
    states = States(lambda: scrapes.collection(_STATE_SECONDS), collector.found)
    scrapes = Scrapes(collector, states.note_collection)
    ranks, queue = RankIndex(collector.found), FairQueue("torchmem-live", _MAX_WAITING, _LIVE_SHARE)
    api = LiveApi(states, ranks, collector.run_dir, queue)
    maps, reports = MapApi(ranks, collector.run_dir, queue), ReportApi(queue)
    discovery = ServiceDiscovery(collector)

    routes = [
        Route("/metrics", scrapes.metrics),
        Route("/sd", discovery.answer),
        Route("/-/healthy", _healthy),
        Route("/-/ready", scrapes.ready),
        Route("/api/v1/state", api.state),
        Route("/api/v1/rank", api.rank),
        Route("/api/v1/history", api.history),
        Route(REPORT_PATH, reports.answer, methods=["POST"]),
        Route("/api/v1/map", maps.answer),
        *(_PAGE_ROUTES if web_ui else [Route("/", _links)]),
    ]
    middleware = [Middleware(Access, config=config, allowed_hosts=allowed_hosts)]

    jobs = partial(_beside, (partial(_collect_first, scrapes, give_back), states.keep_history))
    app = Starlette(routes=routes, middleware=middleware, lifespan=jobs)
    app.router.redirect_slashes = False  # a redirect would contain the client's Host header
    return app


async def _collect_first(scrapes: Scrapes, give_back: Callable[[], None]) -> None:
    await scrapes.collection()
    for seconds in _GIVE_BACK_AFTER_SECONDS:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(give_back)


@asynccontextmanager
async def _beside(
    jobs: Iterable[Callable[[], Coroutine[Any, Any, object]]], _: Starlette
) -> AsyncIterator[None]:
    """Run jobs while the application serves."""
    tasks = [asyncio.create_task(job()) for job in jobs]
    yield
    for task in tasks:
        task.cancel()


async def _healthy(_: Request) -> Response:
    return PlainTextResponse("Healthy.\n")


async def _links(_: Request) -> Response:
    """Answer `/` without the live page."""
    title = f"torchmem exporter {version('torchmem')} on {escape(platform.node())}"
    links = "".join(f'<li><a href="{path}">{path}</a>' for path in _LINKS)
    page = f'<!doctype html><html lang="en"><title>{title}</title><h1>{title}</h1><ul>{links}</ul>'
    return HTMLResponse(page, headers=_LINKS_HEADERS)
