"""The handler of /api/v1/map: asks a rank for its memory map and answers with the newest one."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from torchmem.exporter.live.map_file import MapFiles, expanded_pieces
from torchmem.exporter.live.memory_map import CannotAskError, Requests
from torchmem.exporter.live.states import RankIndex
from torchmem.exporter.scrapes import accepts_gzip
from torchmem.exporter.web.clients import requester
from torchmem.exporter.web.fair_queue import BusyError, FairQueue
from torchmem.exporter.web.peer_user import may_look
from torchmem.node.published import Published
from torchmem.sample.sample import LIVE_STATES

_HEADERS = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
WAITING = "The rank publishes its map with its next snapshot, usually within a few seconds."


class MapApi:
    """Answers with the memory map of one rank; each request asks the rank again.

    200 with the map, 202 while the rank has not published one, 304 if the map is the one that the
    client has; 403, 404 and 409 with a sentence under `error`.
    """

    def __init__(self, ranks: RankIndex, run_dir: Path, queue: FairQueue) -> None:
        self._ranks, self._queue = ranks, queue
        self._requests, self._files = Requests(run_dir), MapFiles(run_dir)

    async def answer(self, request: Request) -> Response:
        """Answer /api/v1/map?id=ID, with the `id` of a rank in the state document."""
        rank = self._ranks.get(request.query_params.get("id", ""))
        if rank is None:
            return _sentence(404, "No rank has this id: it may have ended some time ago.")
        try:
            return await self._queue.run(
                requester(request.scope), partial(self._answer, rank, request)
            )
        except BusyError:
            return _sentence(503, "Too many requests of yours are waiting: try again later.")
        except ValueError as error:
            return _sentence(409, str(error))

    def _answer(self, rank: Published, request: Request) -> Response:
        if not may_look(request.scope, rank.uid):
            return _sentence(403, _forbidden(rank))
        now, is_live = time.time(), rank.state in LIVE_STATES
        problem = self._ask(rank, now) if is_live and request.method == "GET" else None
        found = self._files.read(rank, now)
        if found is None:
            if problem:
                return _sentence(409, problem)
            if is_live:
                return JSONResponse({"waiting": WAITING}, 202, _HEADERS)
            return _sentence(
                404,
                "The rank ended without a map: it publishes one while it is "
                "looked at, and after an OutOfMemoryError.",
            )
        return _served(*found, request)

    def _ask(self, rank: Published, now: float) -> str | None:
        """Ask a rank for its map, and return a sentence if it will not publish one."""
        if rank.sample.memory_map is None:
            return "The rank runs an older torchmem, which publishes no map."
        if not rank.sample.memory_map:
            return "The rank's user has turned the map off with memory_map=False."
        try:
            self._requests.touch(rank, now)
        except CannotAskError as error:
            return str(error)
        return None


def _served(version: str, content: bytes, request: Request) -> Response:
    """Return a map, given as gzipped JSON; 304 if it is the one that the client has."""
    headers = {**_HEADERS, "ETag": f'"{version}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    if not accepts_gzip(request.headers.get("accept-encoding", "")):
        pieces = expanded_pieces(content)
        return StreamingResponse(pieces, headers=headers, media_type="application/json")
    headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type="application/json")


def _forbidden(rank: Published) -> str:
    owner = "root" if rank.uid in {None, 0} else f"user {rank.uid} and root"
    return (
        f"On this node, only {owner} may see this rank's map: open the page there, or through "
        "ssh -L 9847:127.0.0.1:9847 as that user. Elsewhere it takes a password that the "
        "exporter's web.config.file requires."
    )


def _sentence(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status, _HEADERS)
