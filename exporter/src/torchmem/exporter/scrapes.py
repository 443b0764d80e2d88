"""Answers to /metrics and /-/ready.

Scrapes that arrive while a collection runs share it, so a waiting scrape costs only its connection.
Each one is answered before its own timeout. The format and compression follow the client's Accept
headers with their weights (RFC 9110, sections 12.4.2 and 12.5).
"""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from torchmem.exporter.live.state import Found
from torchmem.exporter.run_directory import Published
from torchmem.exporter.web.connections import client_of

MAX_CONCURRENT_SCRAPES_PER_CLIENT = 32
MARGIN_SECONDS = 0.5
TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
_MAX_HEADER_ITEMS = 32
_GZIP_LEVEL = 1  # exposition text shrinks twentyfold already; higher levels cost CPU every scrape
_MIN_GZIP_BYTES = 1000

T = TypeVar("T")


class Collector(Protocol):
    """What the server exports. Its methods are called from several threads."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""

    def collect(self) -> Sequence[Metric]:
        """Return all families, freshly collected."""

    def known(self) -> Sequence[Metric]:
        """Return at once the families that the running collection has so far."""

    def found(self) -> Found:
        """Return at once what the newest collection has found."""

    def published(self) -> Sequence[Published]:
        """Return every process of the run directory; raises OSError when it cannot be read."""


class _Families(CollectorRegistry):
    """Families in the form that prometheus_client's encoders take."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


_openmetrics: Callable[[CollectorRegistry], bytes] = generate_openmetrics  # it has no annotations


@dataclass(frozen=True, slots=True)
class Format:
    """An exposition format."""

    content_type: str
    encode: Callable[[CollectorRegistry], bytes]


TEXT = Format("text/plain; version=0.0.4; charset=utf-8", generate_latest)
OPENMETRICS = Format("application/openmetrics-text; version=1.0.0; charset=utf-8", _openmetrics)


class SharedCall(Generic[T]):
    """Runs a function in a thread. Callers that arrive while it runs share its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._running: asyncio.Task[T] | None = None

    async def result(self, seconds: float | None = None) -> T:
        """Return the result. Raises TimeoutError after `seconds`; the call continues for others."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(asyncio.to_thread(self._function))
        running = self._running
        done, _ = await asyncio.wait({running}, timeout=seconds)
        if not done:
            raise TimeoutError
        return running.result()


class Collection:
    """The families of one collection. Each encoding is made once, in a thread."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = _Families(families)
        self._bodies: dict[tuple[Format, bool], asyncio.Future[bytes]] = {}

    async def body(self, exposition_format: Format, *, compress: bool) -> tuple[bytes, bool]:
        """Return the exposition and whether it is compressed; a short one never is."""
        plain = await self._once(
            (exposition_format, False),
            lambda: asyncio.to_thread(exposition_format.encode, self._families),
        )
        if not compress or len(plain) < _MIN_GZIP_BYTES:
            return plain, False
        compressed = await self._once(
            (exposition_format, True), lambda: asyncio.to_thread(gzip.compress, plain, _GZIP_LEVEL)
        )
        return compressed, True

    async def _once(self, key: tuple[Format, bool], make: Callable[[], Awaitable[bytes]]) -> bytes:
        if key not in self._bodies:
            self._bodies[key] = asyncio.ensure_future(make())
        return await asyncio.shield(self._bodies[key])


class Scrapes:
    """The handlers of /metrics and /-/ready."""

    def __init__(self, collector: Collector) -> None:
        self._whole = SharedCall(lambda: Collection(collector.collect()))
        self._known = SharedCall(lambda: Collection(collector.known()))
        self._waiting = Counter[str]()
        self._collected = False

    async def collection(self, seconds: float | None = None) -> Collection:
        """Return a whole collection, or what is known after `seconds` while it continues."""
        try:
            collection = await self._whole.result(seconds)
        except TimeoutError:
            return await self._known.result()
        self._collected = True
        return collection

    async def metrics(self, request: Request) -> Response:
        """Answer /metrics in the format that the client prefers; 503 beyond the limit."""
        client = client_of(request.client.host) if request.client else ""
        if self._waiting[client] >= MAX_CONCURRENT_SCRAPES_PER_CLIENT:
            return PlainTextResponse("Too many concurrent scrapes: try again later.\n", 503)
        self._waiting[client] += 1
        try:
            return await self._exposition(request)
        finally:
            self._waiting[client] -= 1
            self._waiting += Counter()

    async def ready(self, _: Request) -> Response:
        """Answer /-/ready: 200 once a collection has finished."""
        if self._collected:
            return PlainTextResponse("Ready.\n")
        return PlainTextResponse("Not ready: the first collection has not finished.\n", 503)

    async def _exposition(self, request: Request) -> Response:
        collection = await self.collection(answer_seconds(request.headers.get(TIMEOUT_HEADER)))
        exposition_format = choose_format(request.headers.get("accept", ""))
        gzipped = accepts_gzip(request.headers.get("accept-encoding", ""))
        body, compressed = await collection.body(exposition_format, compress=gzipped)
        headers = {
            "Content-Type": exposition_format.content_type,
            "Vary": "Accept, Accept-Encoding",
        }
        if compressed:
            headers["Content-Encoding"] = "gzip"
        return Response(body, headers=headers)


def answer_seconds(timeout: str | None) -> float | None:
    """Return the seconds in which to answer a scraper that sends this timeout, None for any.

    The margin of MARGIN_SECONDS, at most half of the timeout, is left for sending the answer.
    """
    try:
        seconds = float(timeout or "")
    except ValueError:
        return None
    return max(seconds - MARGIN_SECONDS, seconds / 2) if 0 < seconds < 1e6 else None


def choose_format(accept: str) -> Format:
    """Return OPENMETRICS (1.0.0) for a client that prefers it over text, else TEXT."""
    weights = {TEXT: 0.0, OPENMETRICS: 0.0}
    for name, parameters, weight in _items(accept):
        if name == "application/openmetrics-text" and parameters.get("version", "1.0.0") == "1.0.0":
            weights[OPENMETRICS] = max(weights[OPENMETRICS], weight)
        elif name in {"text/plain", "text/*", "*/*"}:
            weights[TEXT] = max(weights[TEXT], weight)
    prefers_openmetrics = weights[OPENMETRICS] > 0 and weights[OPENMETRICS] >= weights[TEXT]
    return OPENMETRICS if prefers_openmetrics else TEXT


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether the client accepts gzip: `gzip;q=0` forbids it, `*` covers unnamed codings."""
    weights = {name: weight for name, _, weight in _items(accept_encoding)}
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0


def _items(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, parameters and weight of each item, except items with an invalid weight."""
    for item in header.split(",")[:_MAX_HEADER_ITEMS]:
        name, *rest = (part.strip().lower() for part in item.split(";"))
        pairs = (part.partition("=") for part in rest)
        parameters = {key.strip(): value.strip().strip('"') for key, _, value in pairs}
        try:
            weight = float(parameters.pop("q", "1"))
        except ValueError:
            continue
        if name and 0 <= weight <= 1:
            yield name, parameters, weight
