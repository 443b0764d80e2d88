"""Who may ask what: GET and HEAD without a body, within the rate limit, with a password where one is asked for."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchmem.exporter.web.basic_auth import BasicAuth, BusyError
from torchmem.exporter.web.config import WebConfig
from torchmem.exporter.web.rate_limit import Bucket

_METHODS = ("GET", "HEAD")


class Access:
    """ASGI middleware that answers for the application what may not reach it."""

    def __init__(self, app: ASGIApp, config: Callable[[], WebConfig]) -> None:
        self._app, self._config = app, config
        self._auth, self._bucket = BasicAuth(), Bucket()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; everything else goes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        config = self._config()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict(config.headers))
            await send(message)

        refusal = await self._refusal(scope, config)
        await (refusal or self._app)(scope, receive, send_with_headers)

    async def _refusal(self, scope: Scope, config: WebConfig) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in _METHODS:
            return _say(
                405, "Only GET and HEAD are served.", Allow=", ".join(_METHODS), Connection="close"
            )
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return _say(413, "No request here has a body.", Connection="close")
        if not self._bucket.take(config.rate_limit):
            return _say(429, "Too many requests: try again later.")
        if not config.users:
            return None
        try:
            admitted = await self._auth.admits(headers.get("authorization"), dict(config.users))
        except BusyError:
            return _say(503, "Too many passwords to check at once: try again later.")
        return (
            None
            if admitted
            else _say(401, "Name and password are needed.", **{"WWW-Authenticate": "Basic"})
        )


def _say(status: int, sentence: str, **headers: str) -> Response:
    return PlainTextResponse(f"{sentence}\n", status_code=status, headers=headers)
