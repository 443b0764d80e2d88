"""Ask an exporter of any version for the records of its node."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urlencode

from torchmem.cli.http import HttpAnswer, fetch, why_not
from torchmem.node.state import NodeState, RankWhy, decode, decode_why

Fetch = Callable[[str], HttpAnswer]
STATE_PATH = "/api/v1/state"
EXAMPLE = "--exporter http://HOST:9847"
RANK_PATH = "/api/v1/rank"


class AwayError(Exception):
    """There is no state; the text completes a sentence that starts with the exporter's address."""


class SilentError(AwayError):
    """Nothing answers at the address."""


def ask(url: str, get: Fetch = fetch) -> NodeState:
    """Return the state of the exporter at `url`. Raise AwayError."""
    try:
        answer = get(url + STATE_PATH)
    except (OSError, ValueError) as error:
        raise SilentError(f"does not respond: {why_not(error)}") from error
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        raise AwayError("asks for a password: pass --exporter http://USER:PASSWORD@HOST:9847")
    if answer.status != HTTPStatus.OK and _is_prometheus(url, get):
        raise AwayError(f"is Prometheus: pass the address of an exporter, such as {EXAMPLE}")
    if answer.status != HTTPStatus.OK:
        raise AwayError(f"answers with status {answer.status}, unlike a current torchmem exporter")
    return read(answer.body)


def read(body: bytes) -> NodeState:
    """Return the state in the body of an answer. Raise AwayError if it is not one."""
    try:
        return decode(body)
    except ValueError as error:
        raise AwayError("answers, but not with a state that this torchmem can read") from error


def _is_prometheus(url: str, get: Fetch) -> bool:
    try:
        answer = get(url + "/api/v1/status/buildinfo")
    except (OSError, ValueError):
        return False
    return answer.status == HTTPStatus.OK and b'"status":"success"' in answer.body


def ask_rank(url: str, gpu: str, id_: str, get: Fetch = fetch) -> RankWhy | None:
    """Return why the memory of a rank is as it is; None without an answer."""
    query = urlencode({"id": id_, "gpu": gpu})
    try:
        answer = get(f"{url}{RANK_PATH}?{query}")
        return decode_why(answer.body) if answer.status == HTTPStatus.OK else None
    except (OSError, ValueError):
        return None
