"""The web application: /metrics, /sd, the probes, the live page and its API, the landing page."""

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

from torchmem.exporter.discovery import HOST, ServiceDiscovery
from torchmem.exporter.live.api import LiveApi
from torchmem.exporter.live.map_api import MapApi
from torchmem.exporter.live.page import page, static_file
from torchmem.exporter.live.report_api import ReportApi
from torchmem.exporter.live.states import RankIndex, States
from torchmem.exporter.scrape_limits import NODE_LIMITS, as_yaml
from torchmem.exporter.scrapes import Collector, Scrapes
from torchmem.exporter.web.access import REPORT_PATH, Access
from torchmem.exporter.web.config import WebConfig
from torchmem.exporter.web.fair_queue import FairQueue

_LINKS = (
    ("/metrics", "Metrics", "the endpoint that Prometheus scrapes"),
    ("/sd", "Service discovery", "ranks that serve their own endpoint"),
    ("/-/healthy", "Healthy", "the process serves requests"),
    ("/-/ready", "Ready", "the first collection has finished"),
)
_PAGE_ROUTES = (Route("/", page), Route("/static/{digest}/{name}", static_file))
_STATE_SECONDS = 5.0
"""How long a client of the state waits for a driver that hangs."""
_MAX_WAITING = 8  # requests of one client about ranks and maps
_LIVE_SHARE = 0.25
"""The largest share of the time that such requests take, however many there are."""
_GIVE_BACK_AFTER_SECONDS = (0.0, 60.0)
_PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6878; --line: #d9dfe7; --card: #fff;
  --page: #f4f6f9; --accent: #b5380b }
@media (prefers-color-scheme: dark) { :root { --ink: #e8edf3; --soft: #9aa7b6; --line: #2c3644;
  --card: #19212c; --page: #10161e; --accent: #ff8a5c } }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { width: min(34rem, calc(100vw - 2rem)); background: var(--card);
  border: 1px solid var(--line); border-radius: 12px; padding: 2rem; margin: 1rem 0;
  box-sizing: border-box }
h1 { margin: 0; font-size: 1.5rem } h2 { margin: 1.5rem 0 .5rem; font-size: 1rem }
p { margin: .25rem 0 1.5rem; color: var(--soft) } p:last-child { margin: .75rem 0 0 }
a { display: flex; justify-content: space-between; gap: 1rem; padding: .75rem 0;
  border-top: 1px solid var(--line); color: var(--accent); text-decoration: none; font-weight: 600 }
a:hover { text-decoration: underline }
nav { border-bottom: 1px solid var(--line) }
span { color: var(--soft); font-weight: 400; text-align: right }
pre { margin: 0; padding: .75rem 1rem; background: var(--page); border-radius: 8px;
  overflow-x: auto }
pre, code { font: 13px/1.5 ui-monospace, monospace } code { white-space: nowrap }
"""


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
        *(_PAGE_ROUTES if web_ui else [Route("/", _landing_page)]),
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


async def _landing_page(request: Request) -> Response:
    host = request.headers.get("host", "")
    address = host if HOST.fullmatch(host) else platform.node()
    secure = request.scope["scheme"] == "https"
    text = landing_page(version("torchmem"), platform.node(), address, secure=secure)
    return HTMLResponse(text, headers=_PAGE_HEADERS)


def landing_page(version_: str, node: str, address: str, *, secure: bool) -> str:
    """Return the HTML page at `/` without the live page; it loads nothing from other hosts.

    `address` is HOST:PORT as in the browser; `secure` is True when the page is served over TLS.
    """
    links = "".join(
        f'<a href="{path}">{name}<span>{text}</span></a>' for path, name, text in _LINKS
    )
    title = f"torchmem exporter on {escape(node)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>torchmem exporter</h1><p>Version {escape(version_)} on {escape(node)}: "
        f"PyTorch GPU memory of every rank, with NVML's metrics.</p><nav>{links}</nav>"
        f"<h2>In prometheus.yml</h2><pre>{escape(_scrape_config(address, secure=secure))}</pre>"
        "<p>Settings: <code>torchmem exporter --print-config</code>. "
        "TLS and passwords: <code>--web.config.file</code>.</p></main></body></html>"
    )


def _scrape_config(address: str, *, secure: bool) -> str:
    scheme = "    scheme: https\n" if secure else ""
    return (
        f"scrape_configs:\n  - job_name: torchmem\n{scheme}{as_yaml(NODE_LIMITS, '    ')}"
        f"    static_configs:\n      - targets: ['{address}']"
    )
