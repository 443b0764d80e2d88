"""HTTP requests of the commands, to an exporter, Prometheus or Grafana.

The servers are not trusted: one deadline and one size hold for a whole answer, from the look-up of
the host's name to the last byte. A timeout of urllib would hold for each read, and not for the
look-up at all, so a thread asks, and is left behind at the deadline.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import threading
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
from typing import TypeVar

from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import check_file
from torchmem.sample.untrusted import sanitize_text, strict_json

TIMEOUT_SECONDS = 10.0
MAX_ANSWER_BYTES = 32 << 20
MAX_REDIRECTS = 5
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
T = TypeVar("T")


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
    target = parts._replace(netloc=host).geturl()
    return _within(timeout_seconds, partial(_followed, target, given, timeout_seconds))


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
    return _within(TIMEOUT_SECONDS, partial(_sent, request, TIMEOUT_SECONDS))


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Return what `ask` returns, or raise what it raises. Raise TimeoutError after `seconds`."""
    found: SimpleQueue[T | Exception] = SimpleQueue()
    threading.Thread(target=_put, args=(found, ask), daemon=True).start()
    try:
        answer = found.get(timeout=seconds)
    except Empty:
        raise TimeoutError("timed out") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _put(found: SimpleQueue[T | Exception], ask: Callable[[], T]) -> None:
    try:
        found.put(ask())
    except Exception as error:  # noqa: BLE001 - raised where it is awaited
        found.put(error)


def _followed(url: str, headers: Mapping[str, str], timeout_seconds: float) -> HttpAnswer:
    for _ in range(MAX_REDIRECTS + 1):
        request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310
        answer = _sent(request, timeout_seconds)
        if not answer.location:
            return answer
        url = _redirected(url, answer.location)
    raise OSError("it redirects again and again")


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


def _sent(request: urllib.request.Request, timeout_seconds: float) -> HttpAnswer:
    """Return the answer of the server, or of the proxy in the environment, as it is.

    The timeout is that of a single read: it ends a thread that is no longer waited for.
    """
    # Not `build_opener`, whose further handlers follow redirects and raise other statuses.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
    ):
        opener.add_handler(handler())
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
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
