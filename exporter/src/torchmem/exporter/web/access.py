"""Access control before the application: methods, request bodies, the rate limit, passwords."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import bcrypt
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchmem.exporter.web.config import RateLimit, WebConfig

MAX_WAITING_PASSWORDS = 8
_METHODS = ("GET", "HEAD")
_BCRYPT_BYTES = 72  # bcrypt ignores the rest of a password; Go and htpasswd cut it there too


class Access:
    """ASGI middleware that answers every request which may not reach the application."""

    def __init__(self, app: ASGIApp, config: Callable[[], WebConfig]) -> None:
        self._app, self._config = app, config
        self._auth, self._bucket = BasicAuth(), TokenBucket()

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
        await (refusal or self._app)(scope, receive, send_with_headers)

    async def _refusal(self, scope: Scope, config: WebConfig) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in _METHODS:
            allowed = {"Allow": ", ".join(_METHODS), "Connection": "close"}
            return _plain_text(405, "Only GET and HEAD are supported.", allowed)
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return _plain_text(413, "Requests must not have a body.", {"Connection": "close"})
        if not self._bucket.take(config.rate_limit):
            return _plain_text(429, "Too many requests: try again later.")
        return await self._password_refusal(headers, config) if config.users else None

    async def _password_refusal(self, headers: Headers, config: WebConfig) -> Response | None:
        try:
            admitted = await self._auth.admits(headers.get("authorization"), dict(config.users))
        except BusyError:
            return _plain_text(503, "Too many passwords are being checked: try again later.")
        if admitted:
            return None
        challenge = {"WWW-Authenticate": "Basic"}
        return _plain_text(401, "A user name and a password are required.", challenge)


def _plain_text(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{sentence}\n", status, headers)


class BusyError(Exception):
    """MAX_WAITING_PASSWORDS passwords are waiting for their check already."""


class BasicAuth:
    """Checks the Authorization header, one bcrypt at a time, so that guessing takes at most a core.

    An unknown name takes as long as a known one. A correct password costs bcrypt once: only
    verified passwords are remembered, as keyed digests, so strangers cannot make memory grow.
    """

    def __init__(self, check: Callable[[bytes, str], bool] | None = None) -> None:
        self._check = check or _check
        self._key = secrets.token_bytes(32)
        self._verified: dict[str, bytes] = {}
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchmem-bcrypt")

    async def admits(self, header: str | None, users: Mapping[str, str]) -> bool:
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
        if not await self._matches(password, known or _decoy(users)) or not known:
            return False
        self._verified = {user: kept for user, kept in self._verified.items() if user in users}
        self._verified[name] = digest
        return True

    async def _matches(self, password: bytes, hashed: str) -> bool:
        if self._waiting >= MAX_WAITING_PASSWORDS:
            raise BusyError
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._check, password, hashed)
        finally:
            self._waiting -= 1

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
        return bcrypt.checkpw(password[:_BCRYPT_BYTES], hashed.encode())
    except ValueError:
        return False


def _decoy(users: Mapping[str, str]) -> str:
    """Return a hash that no password matches, with the highest cost among `users`."""
    return max(users.values(), key=lambda hashed: int(hashed[4:6]))[:7] + "." * 53


class TokenBucket:
    """The tokens of a rate limit. A changed limit starts with a full bucket."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit: RateLimit | None = None
        self._tokens = 0.0
        self._filled_at = 0.0

    def take(self, limit: RateLimit | None) -> bool:
        """Take a token; return False when there is none. Without a limit there always is."""
        if limit is None:
            return True
        now = self._clock()
        if limit != self._limit:
            self._limit, self._tokens, self._filled_at = limit, limit.burst, now
        earned = (now - self._filled_at) / limit.interval_seconds
        self._tokens = min(limit.burst, self._tokens + earned)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
