"""HTTP requests of the commands, to an exporter, Prometheus or Grafana.

The servers are not trusted: one deadline and one size hold for a whole answer, from the look-up of
the host's name to the last byte. A timeout of urllib or http.client would hold for each read, and
not for the look-up at all.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any

from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import check_file
from torchmem.sample.untrusted import sanitize_text, strict_json

TIMEOUT_SECONDS = 10.0
MAX_ANSWER_BYTES = 32 << 20
MAX_REDIRECTS = 5
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class TooLargeError(OSError):
    """An answer that is larger than MAX_ANSWER_BYTES."""

    def __init__(self) -> None:
        super().__init__(f"its answer has more than {MAX_ANSWER_BYTES >> 20} MiB")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An HTTP answer: its status code, its Date header in Unix seconds if valid, and its body.

    `location`: the URL to which it redirects, empty if it does not.
    """

    status: int
    date: float | None
    body: bytes
    location: str = ""


def fetch(
    url: str, headers: Mapping[str, str] = NO_HEADERS, timeout_seconds: float = TIMEOUT_SECONDS
) -> HttpAnswer:
    """GET a URL, which may contain a user and a password.

    Redirects are followed on the same server only, which gets the credentials and `headers` again.
    Raises TimeoutError, TooLargeError, or another OSError or ValueError without an answer.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in _PORTS:
        raise ValueError("it does not start with http:// or https://")
    credentials, _, host = parts.netloc.rpartition("@")
    given = {**_authorization(credentials), **headers}
    target, deadline = parts._replace(netloc=host).geturl(), _Deadline(timeout_seconds)
    for _ in range(MAX_REDIRECTS + 1):
        answer = _sent(urllib.request.Request(target, headers=given), deadline)  # noqa: S310
        if not answer.location:
            return answer
        target = _redirected(target, answer.location)
    raise OSError("it redirects again and again")


def call(url: str, token: str, body: object = None) -> HttpAnswer:
    """GET a URL of a JSON API with a bearer token, or POST a body to it.

    Redirects are not followed, because a redirected POST would become a GET. Raises the errors of
    `fetch`.
    """
    request = urllib.request.Request(  # noqa: S310 - the caller checks the scheme
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {token}",
            "Accept": "application/json",
            "Content-Type": "application/json",
        },
    )
    return _sent(request, _Deadline(TIMEOUT_SECONDS))


def _authorization(credentials: str) -> dict[str, str]:
    """Return the header for USER:PASSWORD of a URL; nothing for an empty text."""
    encoded = base64.b64encode(urllib.parse.unquote(credentials).encode()).decode()
    return {"Authorization": f"Basic {encoded}"} if credentials else {}


def _redirected(url: str, location: str) -> str:
    """Return the URL of a redirect. Raise OSError unless it is on the same server."""
    target = urllib.parse.urljoin(url, location)
    if _origin(target) != _origin(url):
        shown = sanitize_text(without_credentials(target))
        raise OSError(f"it redirects to {shown}: give that address if you trust it")
    return target


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


class _Deadline:
    """The time until which a whole answer must have come."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left. Raise TimeoutError if there are none."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        return seconds

    def connect(
        self, address: tuple[str, int], _: float, source: tuple[str, int] | None
    ) -> socket.socket:
        """Return a connected socket, in the way of socket.create_connection.

        A thread looks the name up, because nothing can end that. It ends by itself at the latest
        when the resolver gives up.
        """
        connected: SimpleQueue[socket.socket | Exception] = SimpleQueue()
        connect = partial(socket.create_connection, address, self.left(), source)
        threading.Thread(target=_put, args=(connected, connect), daemon=True).start()
        try:
            found = connected.get(timeout=self.left())
        except Empty:
            raise TimeoutError("timed out") from None
        if isinstance(found, Exception):
            raise found
        found.settimeout(self.left())  # for the TLS handshake as a whole
        return found


def _put(
    found: SimpleQueue[socket.socket | Exception], connect: Callable[[], socket.socket]
) -> None:
    try:
        found.put(connect())
    except Exception as error:  # noqa: BLE001 - raised where it is awaited
        found.put(error)


class _TimedReader(io.RawIOBase):
    """The bytes of a socket until the deadline; `raw` reads them, in the socket's own way."""

    def __init__(self, deadline: _Deadline, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._deadline, self._sock, self._raw = deadline, sock, raw

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what there is, at least a byte. Raise TimeoutError."""
        self._sock.settimeout(self._deadline.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """Close the socket's file."""
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, deadline: _Deadline, sock: socket.socket, *more: Any, **rest: Any) -> None:
        super().__init__(sock, *more, **rest)
        self.fp = io.BufferedReader(_TimedReader(deadline, sock, self.fp.detach()))


class _Http(http.client.HTTPConnection):
    def __init__(self, deadline: _Deadline, host: str, **settings: Any) -> None:
        super().__init__(host, **settings)
        self._deadline = deadline
        self._create_connection = deadline.connect
        self.response_class = partial(_Response, deadline)  # type: ignore[assignment]

    def send(self, data: Any) -> None:
        """Send bytes, after connecting if need be."""
        if self.sock is None:
            self.connect()
        self.sock.settimeout(self._deadline.left())
        super().send(data)


class _Https(_Http, http.client.HTTPSConnection):
    pass


class _Handler(urllib.request.AbstractHTTPHandler):
    """Opens connections that have a deadline."""

    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request over HTTP."""
        return self.do_open(partial(_Http, self._deadline), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request over TLS."""
        return self.do_open(partial(_Https, self._deadline), request)

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_


def _sent(request: urllib.request.Request, deadline: _Deadline) -> HttpAnswer:
    """Return the answer of the server, or of the proxy in the environment, as it is."""
    opener = urllib.request.OpenerDirector()
    opener.add_handler(urllib.request.ProxyHandler())
    opener.add_handler(_Handler(deadline))
    try:
        with opener.open(request, timeout=deadline.left()) as answer:
            return _answer(answer)
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else error from None
    except http.client.HTTPException as error:
        raise OSError(f"its answer is not HTTP: {type(error).__name__}") from error


def _answer(answer: http.client.HTTPResponse) -> HttpAnswer:
    body = answer.read(MAX_ANSWER_BYTES + 1)
    if len(body) > MAX_ANSWER_BYTES:
        raise TooLargeError
    location = answer.headers.get("Location", "") if answer.status in _REDIRECTS else ""
    return HttpAnswer(answer.status, _seconds(answer.headers.get("Date")), body, location)


def _seconds(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except (ValueError, TypeError, OverflowError):
        return None


def server_url(text: str, server: str, example: str) -> str:
    """Return the URL of a server, without a slash at the end; http:// may be left out.

    Raises UsageError, which says that it is not the URL of `server`, for example `example`.
    """
    whole = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parts = urllib.parse.urlsplit(whole)
        is_valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or not whole.isascii() or not whole.isprintable() or " " in whole:
        shown = sanitize_text(without_credentials(whole))
        raise UsageError(f"{shown} is not the URL of {server}: write {example}.")
    return whole


def exporter_url(text: str) -> str:
    """Return the URL of an exporter, also when that of its metrics is given. Raise UsageError.

    A file in its place is a UsageError that names the file's command.
    """
    check_file(Path(text), None, "the address of an exporter")
    return server_url(text, "an exporter", "http://HOST:9847").removesuffix("/metrics")


def bearer_token(file: Path | None, variable: str) -> str:
    """Return the token in a file, else in an environment variable; "" without one.

    Raises UsageError, which does not show it.
    """
    try:
        text = file.read_text(encoding="ascii") if file else os.environ.get(variable, "")
    except (OSError, ValueError):
        raise UsageError(f"cannot read the token from {file}: check --token-file.") from None
    token = text.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("the token is not one line of ASCII characters: check where it is from.")
    return token


def message(answer: HttpAnswer, key: str) -> str | None:
    """Return what a JSON API says about an error under `key`; None if it says nothing there."""
    try:
        return sanitize_text(str(strict_json(answer.body)[key]))
    except (ValueError, KeyError, TypeError):
        return None


def why_not(error: OSError | ValueError) -> str:
    """Return the reason why `fetch` failed."""
    return sanitize_text(str(getattr(error, "strerror", None) or error))


def without_credentials(url: str) -> str:
    """Return a URL that can be printed."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
