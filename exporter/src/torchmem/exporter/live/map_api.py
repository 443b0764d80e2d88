"""The handler of /api/v1/map: asks a rank for its memory map and answers with the newest one."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchmem.exporter.live.memory_map import CannotAskError, MapFiles, Requests
from torchmem.exporter.run_directory import Published
from torchmem.exporter.scrapes import accepts_gzip
from torchmem.exporter.web.peer_user import may_look
from torchmem.sample.sample import LIVE_STATES

_HEADERS = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
WAITING = "The rank publishes its map with its next snapshot, usually within a few seconds."


class MapApi:
    """Answers with the memory map of one rank; each request renews that the rank is asked.

    200 with the map, 202 while the rank has not published one, 304 if the map is the one that the
    client has; 403, 404 and 409 with a sentence under `error`.
    """

    def __init__(self, published: Callable[[], Sequence[Published]], run_dir: Path) -> None:
        self._published = published
        self._requests, self._files = Requests(run_dir), MapFiles(run_dir)
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, request: Request) -> Response:
        """Answer /api/v1/map?id=ID, with the `id` of a rank in the state document."""
        wanted = request.query_params.get("id", "")
        rank = next((item for item in self._published() if item.id == wanted), None)
        if rank is None:
            return _sentence(404, "No rank has this id: it may have ended some time ago.")
        if not await asyncio.to_thread(may_look, request.scope, rank.uid):
            return _sentence(403, _forbidden(rank))
        async with self._one_at_a_time:
            try:
                return await asyncio.to_thread(self._answer, rank, request)
            except ValueError as error:
                return _sentence(409, str(error))

    def _answer(self, rank: Published, request: Request) -> Response:
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
        version, content = found
        headers = {**_HEADERS, "ETag": f'"{version}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            headers["Content-Encoding"] = "gzip"
        else:
            content = gzip.decompress(content)
        return Response(content, headers=headers, media_type="application/json")

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


def _forbidden(rank: Published) -> str:
    owner = "root" if rank.uid in {None, 0} else f"user {rank.uid} and root"
    return (
        f"On this node, only {owner} may see this rank's map: open the page there, or through "
        "ssh -L 9847:127.0.0.1:9847 as that user. Elsewhere it takes a password that the "
        "exporter's web.config.file requires."
    )


def _sentence(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status, _HEADERS)
