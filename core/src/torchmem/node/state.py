"""The records of a node: its GPUs, its ranks, and why a rank's memory is as it is.

`/api/v1/state` serves a `NodeState` and `/api/v1/rank` a `RankWhy`; docs/screens.md describes
both for other programs. The exporter fills the records, and every screen reads them. A value of
None is unknown and left out of the JSON. A reader takes the JSON of any version: what it does not
know is ignored, and any field of the classes below may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from torchmem.explain.oom_listings import Listing
from torchmem.explain.parts import ChartArea, LegendEntry, PartBytes
from torchmem.explain.rank_report import Fact
from torchmem.explain.remedy import Remedy
from torchmem.explain.run_chart import Chart, ChartLine
from torchmem.explain.threats import Threat
from torchmem.explain.verdict import Gain
from torchmem.sample.remedy_words import RemedyKind
from torchmem.sample.sample import OomRecord
from torchmem.sample.untrusted import convert, printable_json, strict_json

STATE_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class LastOom:
    """The newest OutOfMemoryError of a rank on a GPU, as in `OomRecord`."""

    timestamp: float | None = None
    cause: str = ""
    requested_bytes: int | None = None
    detail: str | None = None
    onset: str | None = None
    line: str | None = None
    function: str | None = None

    @classmethod
    def of(cls, record: OomRecord) -> LastOom:
        """Return the record of a sample or of a report."""
        return cls(*(getattr(record, field.name) for field in fields(cls)))


@dataclass(frozen=True, slots=True)
class RankState:
    """One process on one GPU. Sizes are in bytes, times in Unix seconds.

    `id` names the process in URLs; `uid` is the user who owns it. `parts` add up to what it holds:
    its reserved bytes and, if known, the bytes outside the allocator; `tensor_bytes` is the part
    that is tensors. `read_steps`: how many steps had ended at the read that the bytes of the step
    count from. `launch` is the label. `start_time` and `sample_time`: when the process started and
    last published; `stats_time` and `snapshot_time`: when its allocator's statistics and its layout
    were read. The headroom is of the time of the statistics. `has_severe_fragmentation`: whether
    the ratio is above the threshold. `why`: how it ended, or while it runs, what threatens it.
    """

    id: str = ""
    rank: int | None = None
    run: str = ""
    pid: int | None = None
    state: str = ""
    sample_time: float | None = None
    launch: str | None = None
    start_time: float | None = None
    parts: tuple[PartBytes, ...] = ()
    tensor_bytes: int | None = None
    uid: int | None = None
    script: str | None = None
    local_rank: int | None = None
    world_size: int | None = None
    stats_time: float | None = None
    snapshot_time: float | None = None
    allocated_bytes: int | None = None
    active_bytes: int | None = None
    reserved_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    outside_allocator_bytes: int | None = None
    fragmentation_ratio: float | None = None
    has_severe_fragmentation: bool = False
    headroom_bytes: int | None = None
    headroom_flush_bytes: int | None = None
    stranded_bytes: int | None = None
    releasable_bytes: int | None = None
    largest_free_block_bytes: int | None = None
    alloc_retries: int | None = None
    ooms: dict[str, int] | None = None
    last_oom: LastOom | None = None
    steps: int | None = None
    read_steps: int | None = None
    step_seconds: float | None = None
    why: tuple[Threat, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuNote:
    """What people should know about who holds a GPU: a sentence, and what to do about it.

    `kind` is that of the remedy; None in the answer of an exporter that does not tell it.
    """

    kind: RemedyKind | None = None
    text: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU or MIG device. The bytes of `parts` add up to `total_bytes`.

    Without NVML and without a running rank, only what ranks hold is known, and they are less.
    The first of `ranks` is in most trouble: those that died, the newest death first, then those
    that stall or are threatened; those that ended normally come last.
    `up` is False for a GPU that does not respond, with NVML's return code where it gave one.
    `index` is NVML's; of a MIG device it is that of its GPU. `notes`: who holds the GPU and should
    not.
    """

    uuid: str = ""
    up: bool = True
    parts: tuple[PartBytes, ...] = ()
    ranks: tuple[RankState, ...] = ()
    index: int | None = None
    name: str | None = None
    error_code: int | None = None
    total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    utilization_ratio: float | None = None
    memory_utilization_ratio: float | None = None
    notes: tuple[GpuNote, ...] = ()


@dataclass(frozen=True, slots=True)
class NvmlState:
    """Whether NVML responds, and the reason if it does not.

    `text`: the reason in words; `step`: what to do about it.
    """

    up: bool = True
    reason: str | None = None
    text: str | None = None
    step: str | None = None


@dataclass(frozen=True, slots=True)
class NodeState:
    """The whole document. `time`: when the collection ended, in Unix seconds.

    `legend`: every part by name, in drawing order. `groups`: the areas of charts over time.
    `waiting`: ranks that have used no GPU yet. `run_dir`: where the exporter looks for ranks.
    `missing`: why ranks are missing and what to do, if some are.
    """

    schema: int = STATE_SCHEMA_VERSION
    time: float | None = None
    node: str = ""
    version: str = ""
    nvml: NvmlState = NvmlState()
    legend: tuple[LegendEntry, ...] = ()
    gpus: tuple[GpuState, ...] = ()
    waiting: tuple[RankState, ...] = ()
    groups: tuple[ChartArea, ...] = ()
    run_dir: str | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class LabeledBytes:
    """What some of a device's memory was used for, in bytes."""

    label: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class OomWhy:
    """An OOM report in the words of `torchmem why`. `time` is in Unix seconds.

    `about`: the process, its GPU and its versions. `parts`: the use of the device at that time; its
    sizes add up to `total_bytes`. `gains`: what each change would have freed; empty if none would
    have made room. `charts`: the whole run, and the minutes before. `listings`: the call stack, the
    lines and tensors that held the memory, if the client may see them, and what to record next
    time; `hidden`: whether some were left out.
    """

    time: float | None = None
    summary: str = ""
    about: tuple[str, ...] = ()
    reason: str = ""
    before: str = ""
    parts: tuple[PartBytes, ...] = ()
    advice: tuple[Remedy, ...] = ()
    gains: tuple[Gain, ...] = ()
    facts: tuple[Fact, ...] = ()
    charts: tuple[Chart, ...] = ()
    listings: tuple[Listing, ...] = ()
    total_bytes: int | None = None
    hidden: bool | None = None


@dataclass(frozen=True, slots=True)
class RankWhy:
    """The answer about one rank on one device.

    `heading`: who it is, and `memory`: what the device was used for, as `torchmem why` prints
    them; `parts_at_peak`: what its tensors were at their peak, the largest first. `holds`: what
    holds its memory; `next_request`: whether the next allocation would succeed;
    `ending`: how it ended. `run`: its memory over the whole run, in at most 64 points. `oom`: its
    newest OOM report, if there is one.
    """

    id: str = ""
    heading: tuple[str, ...] = ()
    memory: tuple[LabeledBytes, ...] = ()
    parts_at_peak: tuple[LabeledBytes, ...] = ()
    holds: str | None = None
    next_request: str | None = None
    ending: str | None = None
    threats: tuple[Threat, ...] = ()
    advice: tuple[Remedy, ...] = ()
    facts: tuple[Fact, ...] = ()
    run: Chart | None = None
    oom: OomWhy | None = None


_WITH_NULL = {Chart, ChartLine}
"""Their unknown values are null: one for each point, or the absent total."""
_WITHOUT_EMPTY = {RankState, RankWhy, Remedy}
"""Their fields are left out if they are empty or false, too."""


def encode(record: Any) -> bytes:
    """Return a record, with the records in it, as JSON."""
    return json.dumps(
        _json_value(record), separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return [_json_value(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    kind: Any = type(value)
    known = {name: getattr(value, name) for name in _names(kind)}
    if kind in _WITHOUT_EMPTY:
        known = {name: item for name, item in known.items() if item != () and item is not False}
    with_null = kind in _WITH_NULL
    return {
        name: _json_value(item) for name, item in known.items() if with_null or item is not None
    }


@cache
def _names(kind: Any) -> Sequence[str]:
    return [field.name for field in fields(kind)]


def decode(data: bytes) -> NodeState:
    """Return the state of a node from JSON that anyone may have written, with printable text.

    Bytes below zero are unknown, and so are the parts of a GPU if they are more than it has. Raise
    ValueError if it is not a state.
    """
    node = convert(printable_json(strict_json(data)), NodeState)
    waiting = tuple(map(_possible_rank, node.waiting))
    return replace(node, gpus=tuple(map(_possible_gpu, node.gpus)), waiting=waiting)


def decode_why(data: bytes) -> RankWhy:
    """Return the answer about a rank, likewise."""
    return convert(printable_json(strict_json(data)), RankWhy)


def _possible_gpu(gpu: GpuState) -> GpuState:
    total = _not_negative(gpu.total_bytes)
    parts = gpu.parts if _fit(gpu.parts, total) else ()
    ranks = tuple(map(_possible_rank, gpu.ranks))
    return replace(gpu, total_bytes=total, parts=parts, ranks=ranks)


def _possible_rank(rank: RankState) -> RankState:
    known: dict[str, Any] = {name: _not_negative(getattr(rank, name)) for name in _SIZES}
    return replace(rank, parts=rank.parts if _fit(rank.parts, None) else (), **known)


_SIZES = [name for name in _names(RankState) if name.endswith("_bytes")]


def _fit(parts: Sequence[PartBytes], total: int | None) -> bool:
    sizes = [part.bytes for part in parts]
    return min(sizes, default=0) >= 0 and (total is None or sum(sizes) <= total)


def _not_negative(size: int | None) -> int | None:
    return None if size is None or size < 0 else size
