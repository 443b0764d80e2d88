"""The state of a node as `/api/v1/state` serves it, read by a program of any version.

The fields are those of `torchmem.exporter.live.state`, but every field may be absent: an older or
newer exporter may not have it. A field of the wrong type is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec

from torchmem.cli.http import HttpAnswer, fetch
from torchmem.sample.untrusted import printable, sanitize_text

Fetch = Callable[[str], HttpAnswer]
STATE_PATH = "/api/v1/state"


class Use(msgspec.Struct, frozen=True):
    """A part of memory, in bytes; `label` is a name that the script gave."""

    name: str = ""
    bytes: int = 0
    label: str | None = None


class LegendRow(msgspec.Struct, frozen=True):
    """A part's name, its label and its color as #rrggbb."""

    name: str = ""
    label: str = ""
    color: str = ""


class Why(msgspec.Struct, frozen=True):
    """One thing to know about a rank."""

    text: str = ""


class Rank(msgspec.Struct, frozen=True):
    """One process on one GPU. Sizes are in bytes, times in Unix seconds."""

    id: str = ""
    rank: int | None = None
    world_size: int | None = None
    run: str = ""
    script: str | None = None
    pid: int | None = None
    state: str = ""
    sample_time: float | None = None
    stats_time: float | None = None
    snapshot_time: float | None = None
    parts: tuple[Use, ...] = ()
    tensor_bytes: int | None = None
    reserved_bytes: int | None = None
    fragmentation_ratio: float | None = None
    has_severe_fragmentation: bool = False
    headroom_flush_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: dict[str, int] | None = None
    steps: int | None = None
    step_seconds: float | None = None
    why: tuple[Why, ...] = ()


class Gpu(msgspec.Struct, frozen=True):
    """One GPU or MIG device. Its parts add up to `total_bytes`."""

    uuid: str = ""
    index: int | None = None
    name: str | None = None
    up: bool = True
    total_bytes: int | None = None
    parts: tuple[Use, ...] = ()
    ranks: tuple[Rank, ...] = ()
    temperature_celsius: float | None = None
    power_watts: float | None = None
    utilization_ratio: float | None = None


class NvmlStatus(msgspec.Struct, frozen=True):
    """Whether NVML responds, and the reason if it does not; `text` is the reason in words."""

    up: bool = True
    reason: str | None = None
    text: str | None = None


class Node(msgspec.Struct, frozen=True):
    """The whole document. `time` is when it was collected, in Unix seconds."""

    time: float | None = None
    node: str = ""
    nvml: NvmlStatus = NvmlStatus()
    legend: tuple[LegendRow, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    waiting: tuple[Rank, ...] = ()


class AwayError(Exception):
    """There is no state; the text completes a sentence that starts with the exporter's address."""


def ask(url: str, get: Fetch = fetch) -> Node:
    """Return the state of the exporter at `url`. Raise AwayError."""
    try:
        answer = get(url + STATE_PATH)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        text = sanitize_text(str(getattr(reason, "strerror", None) or reason))
        raise AwayError(f"does not respond: {text}") from error
    if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        raise AwayError("asks for a password: pass http://USER:PASSWORD@HOST:9847")
    if answer.status != HTTPStatus.OK:
        raise AwayError(f"answers with status {answer.status}: is it a current torchmem exporter?")
    return read(answer.body)


def read(body: bytes) -> Node:
    """Return the document, with its text made printable. Raise AwayError if it is not one."""
    try:
        content = _printable(msgspec.json.decode(body))
        return msgspec.convert(content, Node)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AwayError("answers, but not with a state that this torchmem can read") from error


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list) else value
