"""The handlers of /api/v1/state, /api/v1/events, /api/v1/history and /api/v1/rank."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from torchmem.exporter.live.states import (
    GZIP_HEADER,
    GZIP_LEVEL,
    RankIndex,
    States,
    deflated,
)
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.scrapes import accepts_gzip
from torchmem.exporter.web.clients import requester
from torchmem.exporter.web.fair_queue import BusyError, FairQueue
from torchmem.exporter.web.peer_user import may_look
from torchmem.node.published import Published
from torchmem.node.state import encode
from torchmem.node.why import rank_why
from torchmem.sample.sample import DeviceSample

MAX_KEPT_RANKS = 64
MAX_STREAMS = 64
MAX_STREAMS_PER_CLIENT = 16
STREAM_SECONDS = 45.0
"""The length of a stream, below the server's limit for an answer. Browsers then open the next."""

_RETRY = b"retry: 500\n\n"  # milliseconds
_HEADERS = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
_NO_SUCH_RANK = "No such rank: ask /api/v1/state for the ranks.\n"
_GZIP = {"Content-Encoding": "gzip"}


class LiveApi:
    """Answers with the state of the node, once or as a stream, and about one rank.

    The texts about a rank are rendered once for each collection.
    """

    def __init__(self, states: States, ranks: RankIndex, run_dir: Path, queue: FairQueue) -> None:
        self._states, self._ranks, self._run_dir, self._queue = states, ranks, run_dir, queue
        self._kept_of: NodeReading | None = None
        self._kept: dict[tuple[str, str, bool], bytes] = {}
        self._streams = Counter[str]()
        self._closing = asyncio.Event()

    async def state(self, request: Request) -> Response:
        """Answer /api/v1/state."""
        newest = await self._states.newest()
        gzipped = accepts_gzip(request.headers.get("accept-encoding", ""))
        body = newest.gzipped if gzipped else newest.json
        headers = _HEADERS | (_GZIP if gzipped else {})
        return Response(body, headers=headers, media_type="application/json")

    async def history(self, request: Request) -> Response:
        """Answer /api/v1/history: the last ten minutes of every GPU, or of a rank on one of them.

        The rank is named as in /api/v1/rank; 404 for unknown ones.
        """
        await self._states.newest()
        kept, query = self._states.history, request.query_params
        is_rank = "id" in query
        if is_rank and not self._ranks.get(query["id"]):
            return PlainTextResponse(_NO_SUCH_RANK, 404)
        found = kept.of_rank(query.get("gpu", ""), query["id"]) if is_rank else kept.of_gpus()
        body, headers = encode(found), _HEADERS
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            body, headers = gzip.compress(body, GZIP_LEVEL), _HEADERS | _GZIP
        return Response(body, headers=headers, media_type="application/json")

    async def rank(self, request: Request) -> Response:
        """Answer /api/v1/rank?id=ID&gpu=UUID: why its memory is as it is; 404 for unknown ones."""
        found = (await self._states.newest()).found
        item = self._ranks.get(request.query_params.get("id", ""))
        gpu = request.query_params.get("gpu", "")
        device = item and item.device(gpu)
        if not item or not device:
            return PlainTextResponse(_NO_SUCH_RANK, 404)
        words = partial(self._why, request, found, item, device)
        try:
            body = await self._queue.run(requester(request.scope), words)
        except BusyError:
            return PlainTextResponse("Too many requests of yours are waiting: try later.\n", 503)
        return Response(body, headers=_HEADERS, media_type="application/json")

    def _why(
        self, request: Request, found: NodeReading, item: Published, device: DeviceSample
    ) -> bytes:
        is_allowed = may_look(request.scope, item.uid)
        if self._kept_of is not found or len(self._kept) >= MAX_KEPT_RANKS:
            self._kept_of, self._kept = found, {}
        key = item.id, device.uuid or "", is_allowed
        if key not in self._kept:
            words = rank_why(found, item, device, may_look=is_allowed)
            self._kept[key] = encode(words)
        return self._kept[key]

    async def events(self, request: Request) -> Response:
        """Answer /api/v1/events: a state about every second; 503 beyond the limits."""
        client = requester(request.scope)
        gzipped = accepts_gzip(request.headers.get("accept-encoding", ""))
        headers = _HEADERS | (_GZIP if gzipped else {})
        if request.method == "HEAD":
            return Response(headers=headers, media_type="text/event-stream")
        if (
            self._streams[client] >= MAX_STREAMS_PER_CLIENT
            or self._streams.total() >= MAX_STREAMS
            or self._closing.is_set()
        ):
            return PlainTextResponse("Too many streams: ask for /api/v1/state instead.\n", 503)
        body = self._stream(client, gzipped=gzipped)
        return StreamingResponse(body, headers=headers, media_type="text/event-stream")

    def close(self) -> None:
        """End all streams."""
        self._closing.set()

    async def _stream(self, client: str, *, gzipped: bool) -> AsyncIterator[bytes]:
        self._streams[client] += 1
        try:
            yield GZIP_HEADER + deflated(_RETRY) if gzipped else _RETRY
            async for event in self._events(gzipped=gzipped):
                yield event
        finally:
            self._streams[client] -= 1
            # Drops the clients without a stream, so that addresses do not pile up.
            self._streams += Counter()

    async def _events(self, *, gzipped: bool) -> AsyncIterator[bytes]:
        """Yield each new state, until the stream is long enough or the server closes.

        A stream whose client does not read waits for it, with nothing but the event.
        """
        loop, sent = asyncio.get_running_loop(), 0.0
        end = loop.time() + STREAM_SECONDS
        while loop.time() < end and not self._closing.is_set():
            sent, event = await self._event_after(sent, gzipped=gzipped)
            if event:
                yield event
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._states.pause_seconds)

    async def _event_after(self, sent: float, *, gzipped: bool) -> tuple[float, bytes]:
        """Return the time of the newest state, and its event unless that time is `sent`."""
        newest = await self._states.newest()
        if newest.found.time == sent:
            return sent, b""
        return newest.found.time, newest.deflated_event if gzipped else newest.event
