"""The handler of /api/v1/oom: explains an OOM report that someone has as a file."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchmem.explain.oom_report import decode
from torchmem.exporter.web.clients import requester
from torchmem.exporter.web.fair_queue import BusyError, FairQueue
from torchmem.node.state import encode
from torchmem.node.why import oom_why
from torchmem.sample.errors import UsageError

_HEADERS = {"Cache-Control": "no-store"}


class ReportApi:
    """Answers with the words about the report in a request's body, and keeps nothing of it.

    400 and 503 with a sentence under `error`. Who sends a report has all of it, so nothing is
    hidden.
    """

    def __init__(self, queue: FairQueue) -> None:
        self._queue = queue

    async def answer(self, request: Request) -> Response:
        """Answer a POST to /api/v1/oom."""
        content = await request.body()
        try:
            words = await self._queue.run(requester(request.scope), partial(_words, content))
        except UsageError as error:
            return _sentence(400, f"The file {error}")
        except BusyError:
            return _sentence(503, "Too many requests of yours are waiting: try again later.")
        return Response(words, headers=_HEADERS, media_type="application/json")


def _words(content: bytes) -> bytes:
    return encode(oom_why(decode(content), None, may_look=True))


def _sentence(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status, _HEADERS)
