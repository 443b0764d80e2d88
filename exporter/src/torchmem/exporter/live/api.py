"""The handlers of /api/v1/state, /api/v1/events and /api/v1/rank."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from torchmem.exporter.live.state import Found, encode
from torchmem.exporter.live.states import GZIP_HEADER, EncodedState, States, deflated
from torchmem.exporter.live.why import rank_why
from torchmem.exporter.run_directory import Published
from torchmem.exporter.scrapes import accepts_gzip
from torchmem.exporter.web.connections import client_of
from torchmem.exporter.web.peer_user import may_look
from torchmem.sample.sample import DeviceSample

MAX_STREAMS = 64
MAX_STREAMS_PER_CLIENT = 16
STREAM_SECONDS = 45.0
"""The length of a stream, below the server's limit for an answer. Browsers then open the next."""

_RETRY = b"retry: 500\n\n"  # milliseconds
_HEADERS = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
_GZIP = {"Content-Encoding": "gzip"}


class LiveApi:
    """Answers with the state of the node, once or as a stream."""

    def __init__(self, states: States, run_dir: Path) -> None:
        self._states, self._run_dir = states, run_dir
        self._streams = Counter[str]()
        self._closing = asyncio.Event()

    async def state(self, request: Request) -> Response:
        """Answer /api/v1/state."""
        newest = await self._states.newest()
        gzipped = accepts_gzip(request.headers.get("accept-encoding", ""))
        body = newest.gzipped if gzipped else newest.json
        headers = _HEADERS | (_GZIP if gzipped else {})
        return Response(body, headers=headers, media_type="application/json")

    async def rank(self, request: Request) -> Response:
        """Answer /api/v1/rank?id=ID&gpu=UUID: why its memory is as it is; 404 for unknown ones."""
        found = (await self._states.newest()).found
        asked = request.query_params.get("id", ""), request.query_params.get("gpu", "")
        for item in found.published:
            for device in item.sample.devices:
                if asked == (item.id, device.uuid or ""):
                    body = await asyncio.to_thread(self._why, request, found, item, device)
                    return Response(body, headers=_HEADERS, media_type="application/json")
        return PlainTextResponse("No such rank: ask /api/v1/state for the ranks.\n", 404)

    def _why(self, request: Request, found: Found, item: Published, device: DeviceSample) -> bytes:
        is_allowed = may_look(request.scope, item.uid)
        return encode(rank_why(found, self._run_dir, item, device, may_look=is_allowed))

    async def events(self, request: Request) -> Response:
        """Answer /api/v1/events: a state about every second; 503 beyond the limits."""
        client = client_of(request.client.host) if request.client else ""
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
            async for state in self._each():
                yield state.deflated_event if gzipped else state.event
        finally:
            self._streams[client] -= 1
            self._streams += Counter()

    async def _each(self) -> AsyncIterator[EncodedState]:
        """Yield each new state, until the stream is long enough or the server closes."""
        loop, sent = asyncio.get_running_loop(), None
        end = loop.time() + STREAM_SECONDS
        while loop.time() < end and not self._closing.is_set():
            newest = await self._states.newest()
            if newest is not sent:
                yield newest
                sent = newest
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._states.pause_seconds)
