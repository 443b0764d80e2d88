"""The state of a node as `/api/v1/state` serves it, read by a program of any version.

The fields are those of `torchmem.exporter.live.state`, but every field may be absent: an older or
newer exporter may not have it. A field of the wrong type is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from torchmem.cli.http import HttpAnswer, fetch, why_not
from torchmem.explain.oom_listings import Listing
from torchmem.explain.rank_report import Fact
from torchmem.explain.remedies import Remedy
from torchmem.explain.run_chart import Chart
from torchmem.sample.untrusted import printable_json, strict_json

Fetch = Callable[[str], HttpAnswer]
STATE_PATH = "/api/v1/state"
EXAMPLE = "--exporter http://HOST:9847"
RANK_PATH = "/api/v1/rank"
D = TypeVar("D")


class MemoryShare(msgspec.Struct, frozen=True):
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


class NewestOom(msgspec.Struct, frozen=True):
    """The newest OutOfMemoryError of a rank; its time in Unix seconds."""

    timestamp: float | None = None
    cause: str = ""
    requested_bytes: int | None = None
    detail: str | None = None
    onset: str | None = None
    line: str | None = None


class Rank(msgspec.Struct, frozen=True):
    """One process on one GPU. Sizes are in bytes, times in Unix seconds."""

    id: str = ""
    rank: int | None = None
    world_size: int | None = None
    run: str = ""
    launch: str | None = None
    start_time: float | None = None
    script: str | None = None
    pid: int | None = None
    state: str = ""
    sample_time: float | None = None
    stats_time: float | None = None
    snapshot_time: float | None = None
    parts: tuple[MemoryShare, ...] = ()
    tensor_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    fragmentation_ratio: float | None = None
    has_severe_fragmentation: bool = False
    headroom_flush_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: dict[str, int] | None = None
    last_oom: NewestOom | None = None
    steps: int | None = None
    step_seconds: float | None = None
    why: tuple[Why, ...] = ()


_SIZES = ("tensor_bytes", "allocated_bytes", "reserved_bytes", "headroom_flush_bytes")


class Gpu(msgspec.Struct, frozen=True):
    """One GPU or MIG device. Its parts add up to `total_bytes`."""

    uuid: str = ""
    index: int | None = None
    name: str | None = None
    up: bool = True
    total_bytes: int | None = None
    parts: tuple[MemoryShare, ...] = ()
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
    """The whole document. `time` is when it was collected, in Unix seconds.

    `missing`: why ranks are missing and what to do, empty if none are.
    """

    time: float | None = None
    node: str = ""
    nvml: NvmlStatus = NvmlStatus()
    legend: tuple[LegendRow, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    waiting: tuple[Rank, ...] = ()
    missing: str = ""


class Labeled(msgspec.Struct, frozen=True):
    """What some of a GPU's memory was used for, in bytes."""

    label: str = ""
    bytes: int = 0


class ExplainedOom(msgspec.Struct, frozen=True):
    """An OOM report in words: the verdict in one sentence, the reason in several, and the advice.

    `time` is in Unix seconds, and `parts` the use of the GPU at that time. `listings`: the lines
    and tensors that held the memory, and the call stack; `hidden`: whether the exporter does not
    show them to us.
    """

    time: float | None = None
    summary: str = ""
    reason: str = ""
    before: str = ""
    parts: tuple[MemoryShare, ...] = ()
    advice: tuple[Remedy, ...] = ()
    listings: tuple[Listing, ...] = ()
    hidden: bool | None = None


class RankAnswer(msgspec.Struct, frozen=True):
    """The answer about one rank, as in `torchmem.exporter.live.why.RankWhy`."""

    heading: tuple[str, ...] = ()
    memory: tuple[Labeled, ...] = ()
    next_request: str | None = None
    ending: str | None = None
    threats: tuple[Why, ...] = ()
    advice: tuple[Remedy, ...] = ()
    facts: tuple[Fact, ...] = ()
    run: Chart | None = None
    oom: ExplainedOom | None = None


class AwayError(Exception):
    """There is no state; the text completes a sentence that starts with the exporter's address."""


class SilentError(AwayError):
    """Nothing answers at the address."""


def ask(url: str, get: Fetch = fetch) -> Node:
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


def _is_prometheus(url: str, get: Fetch) -> bool:
    try:
        answer = get(url + "/api/v1/status/buildinfo")
    except (OSError, ValueError):
        return False
    return answer.status == HTTPStatus.OK and b'"status":"success"' in answer.body


def ask_rank(url: str, gpu: str, id_: str, get: Fetch = fetch) -> RankAnswer | None:
    """Return why the memory of a rank is as it is; None without an answer."""
    query = urlencode({"id": id_, "gpu": gpu})
    try:
        answer = get(f"{url}{RANK_PATH}?{query}")
        if answer.status != HTTPStatus.OK:
            return None
        return _converted(answer.body, RankAnswer)
    except (OSError, ValueError):
        return None


def read(body: bytes) -> Node:
    """Return the document, with its text made printable. Raise AwayError if it is not one.

    Bytes below zero are left out, and so are the parts of a GPU if they are more than it has.
    """
    try:
        return _possible(_converted(body, Node))
    except ValueError as error:
        raise AwayError("answers, but not with a state that this torchmem can read") from error


def _possible(node: Node) -> Node:
    gpus = tuple(map(_possible_gpu, node.gpus))
    return msgspec.structs.replace(
        node, gpus=gpus, waiting=tuple(map(_possible_rank, node.waiting))
    )


def _possible_gpu(gpu: Gpu) -> Gpu:
    total = _not_negative(gpu.total_bytes)
    parts = gpu.parts if _fit(gpu.parts, total) else ()
    ranks = tuple(map(_possible_rank, gpu.ranks))
    return msgspec.structs.replace(gpu, total_bytes=total, parts=parts, ranks=ranks)


def _possible_rank(rank: Rank) -> Rank:
    sizes = {name: _not_negative(getattr(rank, name)) for name in _SIZES}
    parts = rank.parts if _fit(rank.parts, None) else ()
    return msgspec.structs.replace(rank, parts=parts, **sizes)


def _fit(parts: Sequence[MemoryShare], total: int | None) -> bool:
    sizes = [part.bytes for part in parts]
    return min(sizes, default=0) >= 0 and (total is None or sum(sizes) <= total)


def _not_negative(size: int | None) -> int | None:
    return None if size is None or size < 0 else size


def _converted(body: bytes, kind: type[D]) -> D:
    """Return a document. Raise ValueError, of which MsgspecError is one."""
    return msgspec.convert(printable_json(strict_json(body)), kind)
