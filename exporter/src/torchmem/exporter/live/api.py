"""The handlers of /api/v1/state, /api/v1/history and /api/v1/rank."""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from torchmem.exporter.live.states import GZIP_LEVEL, RankIndex, States
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

_HEADERS = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
_NO_SUCH_RANK = "No such rank: ask /api/v1/state for the ranks.\n"
_GZIP = {"Content-Encoding": "gzip"}


class LiveApi:
    """Answers with the state of the node, and about one rank.

    The texts about a rank are rendered once for each collection.
    """

    def __init__(self, states: States, ranks: RankIndex, run_dir: Path, queue: FairQueue) -> None:
        self._states, self._ranks, self._run_dir, self._queue = states, ranks, run_dir, queue
        self._kept_of: NodeReading | None = None
        self._kept: dict[tuple[str, str, bool], bytes] = {}

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
