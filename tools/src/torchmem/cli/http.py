"""HTTP requests of the commands, to an exporter, Prometheus or Grafana."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchmem.sample.errors import UsageError
from torchmem.sample.file_kinds import check_file
from torchmem.sample.untrusted import sanitize_text

TIMEOUT_SECONDS = 10.0
MAX_ANSWER_BYTES = 32 << 20
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An HTTP answer: its status code, its Date header in Unix seconds if valid, and its body."""

    status: int
    date: float | None
    body: bytes


def fetch(
    url: str, headers: Mapping[str, str] = NO_HEADERS, timeout_seconds: float = TIMEOUT_SECONDS
) -> HttpAnswer:
    """GET a URL, which may contain a user and a password; redirects are followed without them.

    Redirects are followed without `headers`, too. Raises OSError or ValueError without an answer.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in {"http", "https"}:
        raise ValueError("it does not start with http:// or https://")
    credentials, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host).geturl())  # noqa: S310 - checked
    if credentials:
        encoded = base64.b64encode(urllib.parse.unquote(credentials).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    for name, value in headers.items():
        request.add_unredirected_header(name, value)
    return _sent(request, urllib.request.build_opener(), timeout_seconds)


def call(url: str, token: str, body: object = None) -> HttpAnswer:
    """GET a URL of a JSON API with a bearer token, or POST a body to it.

    Redirects are not followed, because a redirected POST would become a GET. Raises OSError or
    ValueError without an answer.
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
    return _sent(request, urllib.request.build_opener(_NoRedirects()))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow no redirect."""


def _sent(
    request: urllib.request.Request,
    opener: urllib.request.OpenerDirector,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> HttpAnswer:
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            return _answer(answer)
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error)
    except http.client.HTTPException as error:
        raise OSError(f"its answer is not HTTP: {type(error).__name__}") from error


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


def why_not(error: OSError | ValueError) -> str:
    """Return the reason why `fetch` failed."""
    reason = getattr(error, "reason", error)
    return sanitize_text(str(getattr(reason, "strerror", None) or reason))


def without_credentials(url: str) -> str:
    """Return a URL that can be printed."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _answer(answer: Any) -> HttpAnswer:
    date = answer.headers.get("Date")
    try:
        seconds = parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        seconds = None
    return HttpAnswer(answer.status, seconds, answer.read(MAX_ANSWER_BYTES))
