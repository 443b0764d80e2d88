"""Access control before the application: methods, request bodies, the rate limit, passwords."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchmem.exporter.web.clients import requester
from torchmem.exporter.web.config import RateLimit, WebConfig
from torchmem.exporter.web.fair_queue import BusyError, FairQueue
from torchmem.exporter.web.host_names import REFUSAL, is_rebound
from torchmem.exporter.web.http_protocol import MAX_BODY_BYTES
from torchmem.exporter.web.peer_user import ADMITTED, is_foreign

MAX_WAITING_PASSWORDS_PER_CLIENT = 64
_MAX_REMEMBERED_CLIENTS = 1024
_METHODS = ("GET", "HEAD")
REPORT_PATH = "/api/v1/oom"
"""The only path that takes a body: an OOM report to explain."""
_BCRYPT_BYTES = 72  # bcrypt ignores the rest of a password; Go and htpasswd cut it there too


class Access:
    """ASGI middleware that answers every request that may not reach the application."""

    def __init__(
        self, app: ASGIApp, config: Callable[[], WebConfig], allowed_hosts: Collection[str] = ()
    ) -> None:
        self._app, self._config, self._allowed_hosts = app, config, allowed_hosts
        self._auth, self._rates = BasicAuth(), Rates()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; pass every other ASGI scope through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        config = self._config()

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(dict(config.headers))
            await send(message)

        refusal = await self._refusal(scope, config)
        scope[ADMITTED] = bool(config.users)
        await (refusal or self._app)(scope, receive, send_with_headers)

    async def _refusal(self, scope: Scope, config: WebConfig) -> Response | None:
        headers = Headers(scope=scope)
        refusal = _body_refusal(headers) if _takes_body(scope) else _refusal(scope, headers)
        if refusal:
            return refusal
        client = requester(scope)
        if not self._rates.admit(client, config.rate_limit):
            return _plain_text(429, "Too many requests: try again later.")
        if config.users:
            return await self._password_refusal(headers, client, config)
        if is_rebound(scope, self._allowed_hosts):
            return _plain_text(403, REFUSAL)
        return None

    async def _password_refusal(
        self, headers: Headers, client: str, config: WebConfig
    ) -> Response | None:
        header = headers.get("authorization")
        try:
            admitted = await self._auth.admits(header, client, dict(config.users))
        except BusyError:
            return _plain_text(503, "Too many passwords are being checked: try again later.")
        if admitted:
            return None
        challenge = {"WWW-Authenticate": "Basic"}
        return _plain_text(401, "A user name and a password are required.", challenge)


def _takes_body(scope: Scope) -> bool:
    return bool(scope["path"] == REPORT_PATH and scope["method"] == "POST")


def _refusal(scope: Scope, headers: Headers) -> Response | None:
    if scope["method"] not in _METHODS:
        allowed = {"Allow": ", ".join(_METHODS), "Connection": "close"}
        return _plain_text(405, "Only GET and HEAD are supported.", allowed)
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        return _plain_text(413, "Requests must not have a body.", {"Connection": "close"})
    return None


def _body_refusal(headers: Headers) -> Response | None:
    """Refuse a body that is too large or of unknown length, and those of other sites' pages."""
    size = headers.get("content-length", "")
    if "transfer-encoding" in headers or not size.isascii() or not size.isdigit():
        return _plain_text(411, "The length of the body is required.", {"Connection": "close"})
    if int(size) > MAX_BODY_BYTES:
        return _plain_text(413, "The body is too large for an OOM report.", {"Connection": "close"})
    if is_foreign(headers):
        return _plain_text(403, "Another site must not ask this.", {"Connection": "close"})
    return None


def _plain_text(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{sentence}\n", status, headers)


class BasicAuth:
    """Checks the Authorization header.

    An unknown name and a wrong password cost the same, whoever's it is, so that the time of an
    answer does not show which names exist. A correct password costs bcrypt once: only verified
    passwords are remembered, as keyed digests, so strangers cannot make memory grow.
    """

    def __init__(self, check: Callable[[bytes, str], bool] | None = None) -> None:
        self._check = check or _check
        self._key = secrets.token_bytes(32)
        self._verified: dict[str, bytes] = {}
        self._queue = FairQueue("torchmem-bcrypt", MAX_WAITING_PASSWORDS_PER_CLIENT)

    async def admits(self, header: str | None, client: str, users: Mapping[str, str]) -> bool:
        """Return whether the header has the password of one of `users` (name to bcrypt hash).

        Raises BusyError.
        """
        given = credentials(header)
        if given is None:
            return False
        name, password = given
        known = users.get(name)
        digest = self._digest(name, known or "", password)
        if known and hmac.compare_digest(self._verified.get(name, b""), digest):
            return True
        max_cost = max(map(_cost, users.values()))
        hashed = known or _decoy(max_cost)
        matches = await self._queue.run(
            client, partial(self._matches, password, hashed, max_cost - _cost(hashed))
        )
        if not matches or not known:
            return False
        self._verified = {user: kept for user, kept in self._verified.items() if user in users}
        self._verified[name] = digest
        return True

    def _matches(self, password: bytes, hashed: str, missing_cost: int) -> bool:
        """Check a password; a wrong one takes as long as with a cost higher by `missing_cost`.

        Each cost doubles the work, so one more check at each cost from that of `hashed` up to below
        the higher one adds up to the difference.
        """
        if self._check(password, hashed):
            return True
        for cost in range(_cost(hashed), _cost(hashed) + missing_cost):
            self._check(password, _decoy(cost))
        return False

    def _digest(self, name: str, hashed: str, password: bytes) -> bytes:
        parts = (name.encode(), hashed.encode(), password)
        message = b"".join(hashlib.sha256(part).digest() for part in parts)
        return hmac.digest(self._key, message, "sha256")


def credentials(header: str | None) -> tuple[str, bytes] | None:
    """Return name and password of a Basic Authorization header (RFC 7617), None for any other."""
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (name.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None


def _check(password: bytes, hashed: str) -> bool:
    try:
        import bcrypt  # only where there are passwords

        return bcrypt.checkpw(password[:_BCRYPT_BYTES], hashed.encode())
    except ValueError:
        return False


def _cost(hashed: str) -> int:
    return int(hashed[4:6])


def _decoy(cost: int) -> str:
    """Return a hash that no password matches."""
    return f"$2b${cost:02}$" + "." * 53


class Rates:
    """The requests that each client may still make, so that no client uses up another's.

    The limit is a token bucket for each of the most recent clients. A changed limit starts with
    full buckets.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit: RateLimit | None = None
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admit(self, client: str, limit: RateLimit | None) -> bool:
        """Count one request; return False beyond the limit. Without a limit, return True."""
        if limit != self._limit:
            self._limit, self._buckets = limit, OrderedDict()
        if limit is None:
            return True
        now = self._clock()
        tokens, filled_at = self._buckets.pop(client, (limit.burst, now))
        tokens = min(limit.burst, tokens + (now - filled_at) / limit.interval_seconds)
        is_admitted = tokens >= 1
        self._buckets[client] = (tokens - 1 if is_admitted else tokens), now
        if len(self._buckets) > _MAX_REMEMBERED_CLIENTS:
            self._buckets.popitem(last=False)
        return is_admitted
