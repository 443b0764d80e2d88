"""Answers to /metrics and /-/ready.

Scrapes that arrive while a collection runs share it, so a waiting scrape costs only its connection.
Each one is answered before its own timeout. The format and compression follow the client's Accept
headers with their weights (RFC 9110, sections 12.4.2 and 12.5).
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.page_text import PageText
from torchmem.exporter.web.clients import party, requester
from torchmem.exporter.web.fair_queue import in_thread
from torchmem.node.published import Published

try:
    from isal.isal_zlib import compressobj  # takes a fifth of the time
except ImportError:  # as on a platform for which it has no wheels
    from zlib import compressobj  # type: ignore[assignment]

MAX_CONCURRENT_SCRAPES_PER_CLIENT = 32
MARGIN_SECONDS = 0.5
PAUSE_RATIO = 2.0  # times as long as the collection took
MAX_PAUSE_SECONDS = 2.0
TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
_MAX_HEADER_ITEMS = 32
_KEPT_HEADERS = 8  # parsed ones: a scraper sends the same headers each time
_gzip = partial(compressobj, level=1, wbits=zlib.MAX_WBITS | 16, memLevel=5)
"""Exposition text shrinks twentyfold already, and higher levels cost CPU every scrape. With more
memory than this, clearing it takes longer than it saves."""
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

    def found(self) -> NodeReading:
        """Return at once what the newest collection has found."""

    def published(self) -> Sequence[Published]:
        """Return every process of the run directory; raises OSError when it cannot be read."""


_openmetrics: Callable[[CollectorRegistry], bytes] = generate_openmetrics  # it has no annotations


@dataclass(frozen=True, slots=True)
class Format:
    """An exposition format."""

    content_type: str
    encode: Callable[[CollectorRegistry], bytes]
    end: bytes = b""


TEXT = Format("text/plain; version=0.0.4; charset=utf-8", generate_latest)
OPENMETRICS = Format(
    "application/openmetrics-text; version=1.0.0; charset=utf-8", _openmetrics, b"# EOF\n"
)


class SharedCall(Generic[T]):
    """Runs a function in a thread of its own. Callers that arrive while it runs share its result.

    The result is not kept for later callers.
    """

    def __init__(self, name: str, function: Callable[[], T]) -> None:
        self._function = function
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._running: asyncio.Task[T] | None = None

    @property
    def is_running(self) -> bool:
        """Whether callers share a call that has begun."""
        return self._running is not None

    async def result(self, seconds: float | None = None) -> T:
        """Return the result. Raises TimeoutError after `seconds`; the call continues for others."""
        if self._running is None:
            self._running = in_thread(self._thread, self._function)
            self._running.add_done_callback(self._forget)
        running = self._running
        done, _ = await asyncio.wait({running}, timeout=seconds)
        if not done:
            raise TimeoutError
        return running.result()

    def _forget(self, _: asyncio.Task[T]) -> None:
        self._running = None


class Pages:
    """Writes pages in their formats, all in one thread, because it keeps their text."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="torchmem-encode")
        self._texts = {kind: PageText(kind.encode, kind.end) for kind in (TEXT, OPENMETRICS)}

    def write(self, families: Sequence[Metric], exposition_format: Format) -> bytes:
        """Return the exposition. For `thread`."""
        return self._texts[exposition_format].write(families)


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a page is encoded: its format, and whether it is compressed if it is not short."""

    format: Format
    is_compressed: bool


class Collection:
    """The families of one collection. Each encoding is made once."""

    def __init__(self, families: Sequence[Metric], pages: Pages) -> None:
        self._families, self._pages = families, pages
        self._tasks: dict[Encoding, asyncio.Task[tuple[bytes, bool]]] = {}

    async def body(self, encoding: Encoding) -> tuple[bytes, bool]:
        """Return the exposition and whether it is compressed; a short one never is."""
        if encoding not in self._tasks:
            make = partial(self._body, encoding.format, compress=encoding.is_compressed)
            self._tasks[encoding] = in_thread(self._pages.thread, make)
        # Another client may wait for the same page.
        return await asyncio.shield(self._tasks[encoding])

    def _body(self, exposition_format: Format, *, compress: bool) -> tuple[bytes, bool]:
        plain = self._pages.write(self._families, exposition_format)
        if not compress or len(plain) < _MIN_GZIP_BYTES:
            return plain, False
        compressor = _gzip()
        return compressor.compress(plain) + compressor.flush(), True


class Scrapes:
    """The handlers of /metrics and /-/ready. `on_collected` is called after each collection."""

    def __init__(
        self, collector: Collector, on_collected: Callable[[], None] = lambda: None
    ) -> None:
        self._collector, self._on_collected, self._pages = collector, on_collected, Pages()
        self._whole = SharedCall("torchmem-collect", self._collect)
        self._known = SharedCall(
            "torchmem-known", lambda: Collection(collector.known(), self._pages)
        )
        self._waiting = Counter[str]()
        self._collected = False
        self._paused_until: dict[str, float] = {}

    async def collection(self, seconds: float | None = None) -> Collection:
        """Return a whole collection, or what is known after `seconds` while it continues."""
        try:
            collection = await self._whole.result(seconds)
        except TimeoutError:
            return await self._known.result()
        self._collected = True
        return collection

    async def collection_for(self, party: str, seconds: float | None) -> Collection:
        """Return a collection as above, which a party that has just had one begins after a rest.

        It shares those that others begin. So one client that scrapes without a pause leaves two
        thirds of the time to the others.
        """
        rest = self._paused_until.get(party, 0.0) - time.monotonic()
        if rest > 0 and not self._whole.is_running:
            if seconds is not None:
                rest = min(rest, seconds / 2)
                seconds -= rest
            await asyncio.sleep(rest)
        if self._whole.is_running:
            return await self.collection(seconds)
        begun = time.monotonic()
        try:
            return await self.collection(seconds)
        finally:
            now = time.monotonic()
            self._paused_until = {
                p: until for p, until in self._paused_until.items() if until > now
            }
            self._paused_until[party] = now + min(PAUSE_RATIO * (now - begun), MAX_PAUSE_SECONDS)

    def _collect(self) -> Collection:
        collection = Collection(self._collector.collect(), self._pages)
        self._on_collected()
        return collection

    async def metrics(self, request: Request) -> Response:
        """Answer /metrics in the format that the client prefers; 503 beyond the limit."""
        client = requester(request.scope)
        if self._waiting[client] >= MAX_CONCURRENT_SCRAPES_PER_CLIENT:
            return PlainTextResponse("Too many concurrent scrapes: try again later.\n", 503)
        self._waiting[client] += 1
        try:
            return await self._exposition(request)
        finally:
            self._waiting[client] -= 1
            # This forgets the clients whose count is 0.
            self._waiting += Counter()

    async def ready(self, _: Request) -> Response:
        """Answer /-/ready: 200 once a collection has finished."""
        if self._collected:
            return PlainTextResponse("Ready.\n")
        return PlainTextResponse("Not ready: the first collection has not finished.\n", 503)

    async def _exposition(self, request: Request) -> Response:
        seconds = answer_seconds(request.headers.get(TIMEOUT_HEADER))
        encoding = Encoding(
            choose_format(request.headers.get("accept", "")),
            accepts_gzip(request.headers.get("accept-encoding", "")),
        )
        collection = await self.collection_for(party(request.scope), seconds)
        body, compressed = await collection.body(encoding)
        headers = {
            "Content-Type": encoding.format.content_type,
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


@lru_cache(_KEPT_HEADERS)
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


@lru_cache(_KEPT_HEADERS)
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
