"""Access control before the application: methods, request bodies, the rate limit, passwords."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

import bcrypt
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchmem.exporter.web.config import RateLimit, WebConfig
from torchmem.exporter.web.connections import client_of
from torchmem.exporter.web.peer_user import ADMITTED

MAX_WAITING_PASSWORDS_PER_CLIENT = 64
_MAX_REMEMBERED_CLIENTS = 1024
_METHODS = ("GET", "HEAD")
_BCRYPT_BYTES = 72  # bcrypt ignores the rest of a password; Go and htpasswd cut it there too


class Access:
    """ASGI middleware that answers every request which may not reach the application."""

    def __init__(self, app: ASGIApp, config: Callable[[], WebConfig]) -> None:
        self._app, self._config = app, config
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
        if scope["method"] not in _METHODS:
            allowed = {"Allow": ", ".join(_METHODS), "Connection": "close"}
            return _plain_text(405, "Only GET and HEAD are supported.", allowed)
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return _plain_text(413, "Requests must not have a body.", {"Connection": "close"})
        client = client_of(scope["client"][0]) if scope["client"] else ""
        if not self._rates.admit(client, config.rate_limit):
            return _plain_text(429, "Too many requests: try again later.")
        return await self._password_refusal(headers, client, config) if config.users else None

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


def _plain_text(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{sentence}\n", status, headers)


class BusyError(Exception):
    """MAX_WAITING_PASSWORDS_PER_CLIENT passwords of this client are waiting for their check."""


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
        self._queue = _Queue()

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
        return bcrypt.checkpw(password[:_BCRYPT_BYTES], hashed.encode())
    except ValueError:
        return False


def _cost(hashed: str) -> int:
    return int(hashed[4:6])


def _decoy(cost: int) -> str:
    """Return a hash that no password matches."""
    return f"$2b${cost:02}$" + "." * 53


class _Queue:
    """Runs functions one at a time in a thread, so that guessing takes at most one core.

    The next one is of the client that was served least recently; one that was never served, such
    as Prometheus after a restart, comes before those that have failed. A client's own functions
    run in their order.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchmem-bcrypt")
        self._waiting: dict[str, deque[_Job]] = {}
        self._served: OrderedDict[str, int] = OrderedDict()
        self._number = count(1)
        self._is_busy = False

    async def run(self, client: str, function: Callable[[], bool]) -> bool:
        """Return the function's result; raise BusyError if too many of this client wait."""
        waiting = self._waiting.setdefault(client, deque())
        if len(waiting) >= MAX_WAITING_PASSWORDS_PER_CLIENT:
            raise BusyError
        job = _Job(function, asyncio.get_running_loop().create_future())
        waiting.append(job)
        self._start_next()
        try:
            return await job.result
        finally:
            if job in waiting:  # the request was canceled
                self._remove(client, job)

    def _start_next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        client = min(self._waiting, key=lambda client: self._served.get(client, 0))
        job = self._waiting[client][0]
        self._remove(client, job)
        self._note_served(client)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, job.function)
        except RuntimeError:  # the interpreter is shutting down
            job.result.cancel()
            return
        self._is_busy = True
        running.add_done_callback(partial(self._finish, job))

    def _remove(self, client: str, job: _Job) -> None:
        waiting = self._waiting[client]
        waiting.remove(job)
        if not waiting:
            del self._waiting[client]

    def _note_served(self, client: str) -> None:
        self._served[client] = next(self._number)
        self._served.move_to_end(client)
        if len(self._served) > _MAX_REMEMBERED_CLIENTS:
            self._served.popitem(last=False)

    def _finish(self, job: _Job, running: asyncio.Future[bool]) -> None:
        self._is_busy = False
        if not job.result.done():
            if running.cancelled():
                job.result.cancel()
            elif error := running.exception():
                job.result.set_exception(error)
            else:
                job.result.set_result(running.result())
        self._start_next()


@dataclass(eq=False, slots=True)
class _Job:
    """A function and the future of its result."""

    function: Callable[[], bool]
    result: asyncio.Future[bool]


class Rates:
    """The requests that each client may still make, so that none uses up those of another.

    The limit is a token bucket for each client, of those that came last. A changed limit starts
    with full buckets.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit: RateLimit | None = None
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admit(self, client: str, limit: RateLimit | None) -> bool:
        """Count one request; return False beyond the limit. Without a limit there is no end."""
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
