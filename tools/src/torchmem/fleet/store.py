"""A Prometheus-compatible store, asked about a long past in windows that it can answer."""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from torchmem.cli import http
from torchmem.sample.errors import UsageError
from torchmem.sample.untrusted import sanitize_text, strict_json

Row = tuple[Mapping[str, str], float]
"""The labels of a series, and its value."""
Query = Callable[[int], str]
"""Returns an expression over the seconds before the time of its evaluation."""

MAX_WINDOW_SECONDS = 86_400
MIN_WINDOW_SECONDS = 3_600
TOO_MUCH = frozenset(
    {
        HTTPStatus.UNPROCESSABLE_ENTITY,  # too many samples or series
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.SERVICE_UNAVAILABLE,  # a query that takes too long, in Prometheus
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)
_PROBLEMS: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "does not accept the credentials: give --token-file or --header",
    HTTPStatus.FORBIDDEN: "does not allow queries with these credentials: give others with "
    "--token-file or --header",
    HTTPStatus.NOT_FOUND: "has no query API at this path: give the URL that Grafana's data source "
    "has, such as http://HOST:9090, or https://HOST/prometheus for Mimir",
}


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the past, in whole Unix seconds; `start` itself is not part of it."""

    start: int
    end: int

    @property
    def seconds(self) -> int:
        """Its length."""
        return self.end - self.start

    def parts(self, seconds: int) -> Iterator[Window]:
        """Yield consecutive windows of at most that length, a multiple of a minute.

        They end at multiples of it since 1970: those of a day at midnight UTC.
        """
        start = self.start
        while start < self.end:
            end = min((start // seconds + 1) * seconds, self.end)
            yield Window(start, end)
            start = end


class TooMuchError(Exception):
    """The store cannot answer a query, but may answer it over a shorter time."""


@dataclass(slots=True)
class Store:
    """A store, the headers of all requests, and how long it may take for one answer.

    `window_seconds` becomes shorter when the store refuses a query. `is_partial`: it has said that
    an answer is not complete.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = 60.0
    window_seconds: int = MAX_WINDOW_SECONDS
    is_partial: bool = False

    def over(self, past: Window, query: Query) -> Iterator[tuple[Window, list[Row]]]:
        """Yield the answers for the windows of a past, from the oldest to the newest.

        Raises UsageError.
        """
        for window in past.parts(self.window_seconds):
            yield from self._answered(window, query)

    def _answered(self, window: Window, query: Query) -> Iterator[tuple[Window, list[Row]]]:
        try:
            yield window, self.query(query(window.seconds), window.end)
        except TooMuchError as error:
            half = _half(window.seconds)
            if half < MIN_WINDOW_SECONDS:
                raise UsageError(
                    f"{self._name} cannot answer a query over {window.seconds // 60} minutes "
                    f"({error}): raise its limits, or --timeout."
                ) from None
            self.window_seconds = min(self.window_seconds, half)
            for part in window.parts(half):
                yield from self._answered(part, query)

    def query(self, expression: str, time: int) -> list[Row]:
        """Return the result of an instant query. Raise UsageError or TooMuchError."""
        parameters = {"query": expression, "time": time, "timeout": f"{self.timeout_seconds:g}s"}
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode(parameters)}"
        try:
            answer = http.fetch(url, self.headers, self.timeout_seconds)
        except TimeoutError:
            raise TooMuchError(f"no answer within {self.timeout_seconds:g} s") from None
        except http.TooLargeError as error:
            raise TooMuchError(str(error)) from None
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot reach {self._name} ({http.why_not(error)}): check --prometheus."
            ) from error
        return self._rows(answer)

    def _rows(self, answer: http.HttpAnswer) -> list[Row]:
        if answer.status in TOO_MUCH:
            raise TooMuchError(http.message(answer, "error") or f"it answered {answer.status}")
        if answer.status != HTTPStatus.OK:
            raise self._problem(answer)
        try:
            document = strict_json(answer.body)
            self.is_partial = self.is_partial or bool(document.get("isPartial"))
            return list(_rows(document["data"]["result"]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise UsageError(
                f"{self._name} does not answer as Prometheus does: give the URL of Prometheus "
                "itself, behind any login page."
            ) from None

    def _problem(self, answer: http.HttpAnswer) -> UsageError:
        known = _PROBLEMS.get(answer.status, "refuses the query: see its log")
        message = http.message(answer, "error")
        said = f" and {message!r}" if message else ""
        return UsageError(f"{self._name} {known} (it answered {answer.status}{said}).")

    @property
    def _name(self) -> str:
        return sanitize_text(http.without_credentials(self.url))


def _half(seconds: int) -> int:
    """Return half of a window, as a multiple of a minute."""
    return math.ceil(seconds / 120) * 60


def _rows(result: Any) -> Iterator[Row]:
    """Yield the series of an instant vector, with printable labels and finite values."""
    for series in result:
        labels = {sanitize_text(key): sanitize_text(text) for key, text in series["metric"].items()}
        value = float(series["value"][1])
        if math.isfinite(value):
            yield labels, value
