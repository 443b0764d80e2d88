"""The state of a node as one document: each GPU's memory in parts that add up, and its ranks.

`node_state` computes it from what one collection has found. The page at `/` draws it and
`/api/v1/state` serves it; docs/live-page.md describes it for other programs. A field that is None
is unknown and left out of the JSON.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

import msgspec

from torchmem.explain.parts import (
    GROUPS,
    LEGEND,
    ChartArea,
    LegendEntry,
    PartBytes,
    gpu_parts,
    plausible,
    rank_parts,
    tensor_bytes,
)
from torchmem.explain.rank_report import ending
from torchmem.explain.threats import is_severe, threats
from torchmem.explain.thresholds import Limits
from torchmem.exporter.gpus import GpuIdentity
from torchmem.exporter.node_reading import NodeReading
from torchmem.exporter.nvml_reasons import next_step, reason_in_words
from torchmem.exporter.reading import Reading, V
from torchmem.exporter.sample_files import Published
from torchmem.exporter.subjects.memory import MemoryInfo
from torchmem.exporter.subjects.outside_allocator import uses_by_process
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.temperature import Temperatures
from torchmem.exporter.subjects.utilization import Utilization
from torchmem.host.process_table import process_key
from torchmem.sample.sample import LIVE_STATES, DeviceSample, OomRecord, Sample, State

STATE_SCHEMA_VERSION = 1

_NO_DESCRIPTORS = (
    "Ranks are missing, because the exporter has no file descriptor left: raise its limit "
    "(LimitNOFILE= of its unit, or ulimit -n), and restart it."
)


class Document(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base class of the document's parts: what is None or empty is left out of the JSON."""


class PartState(Document, frozen=True, kw_only=True):
    """A part of a GPU's memory, as `PartBytes`."""

    name: str
    bytes: int
    label: str | None = None


def part_states(parts: Iterable[PartBytes]) -> tuple[PartState, ...]:
    """Return parts as the document has them."""
    return tuple(PartState(name=part.name, bytes=part.bytes, label=part.label) for part in parts)


class ThreatText(Document, frozen=True, kw_only=True):
    """One thing that threatens a rank, as `torchmem why` prints it.

    `cause` and `onset` describe the OOM; each is None if unknown.
    """

    text: str
    cause: str | None = None
    onset: str | None = None


class LastOom(Document, frozen=True, kw_only=True):
    """The newest OutOfMemoryError of a rank on a GPU, as in `OomRecord`."""

    timestamp: float
    cause: str
    requested_bytes: int | None = None
    detail: str | None = None
    onset: str | None = None
    line: str | None = None
    function: str | None = None


class RankState(Document, frozen=True, kw_only=True):
    """One process on one GPU. Sizes are in bytes, times in Unix seconds.

    `id` names the process in URLs; `uid` is the user who owns it. `parts` add up to what it holds:
    its reserved bytes and, if known, the bytes outside the allocator; `tensor_bytes` is the part
    that is tensors. `read_steps`: how many steps had ended at the read that the bytes of the step
    count from. `launch` is the label. `start_time` and `sample_time`: when the process started and
    last published; `stats_time` and `snapshot_time`:
    when its allocator's statistics and its layout were read. The headroom is of the time of the
    statistics. `has_severe_fragmentation`: whether the ratio is above the threshold. `why`: what
    threatens it.
    """

    id: str
    rank: int
    run: str
    pid: int
    state: State
    sample_time: float
    launch: str | None = None
    start_time: float | None = None
    parts: tuple[PartState, ...] = ()
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
    why: tuple[ThreatText, ...] = ()


class GpuState(Document, frozen=True, kw_only=True):
    """One GPU or MIG device. The bytes of `parts` add up to `total_bytes`.

    Without NVML and without a running rank, only what ranks hold is known, and they are less.
    The first of `ranks` is in most trouble: those that died, the newest death first, then those
    that stall or are threatened; those that ended normally come last.
    `up` is False for a GPU that does not respond, with NVML's return code where it gave one.
    `index` is NVML's; of a MIG device it is that of its GPU.
    """

    uuid: str
    up: bool
    parts: tuple[PartState, ...]
    ranks: tuple[RankState, ...]
    index: int | None = None
    name: str | None = None
    error_code: int | None = None
    total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    utilization_ratio: float | None = None
    memory_utilization_ratio: float | None = None


class NvmlState(Document, frozen=True, kw_only=True):
    """Whether NVML responds, and the reason if it does not.

    `text`: the reason in words; `step`: what to do about it.
    """

    up: bool
    reason: str | None = None
    text: str | None = None
    step: str | None = None


class NodeState(Document, frozen=True, kw_only=True):
    """The whole document. `time`: when the collection ended, in Unix seconds.

    `legend`: every part by name, in drawing order. `groups`: the areas of charts over time.
    `waiting`: ranks that have used no GPU yet. `run_dir`: where the exporter looks for ranks.
    `missing`: why ranks are missing and what to do, if some are.
    """

    schema: int
    time: float
    node: str
    version: str
    nvml: NvmlState
    legend: tuple[LegendEntry, ...]
    gpus: tuple[GpuState, ...]
    waiting: tuple[RankState, ...]
    groups: tuple[ChartArea, ...] = ()
    run_dir: str | None = None
    missing: str | None = None


def encode(state: Document) -> bytes:
    """Return the document as JSON."""
    return msgspec.json.encode(state)


def decode(data: bytes) -> NodeState:
    """Return the document; raises msgspec.MsgspecError for anything else."""
    return msgspec.json.decode(data, type=NodeState)


def node_state(found: NodeReading) -> NodeState:
    """Return the state of the node."""
    return NodeState(
        schema=STATE_SCHEMA_VERSION,
        time=found.time,
        node=platform.node(),
        version=_version(),
        nvml=_nvml(found.reading.down_reason),
        legend=LEGEND,
        groups=GROUPS,
        gpus=tuple(_gpus(found)),
        waiting=tuple(
            _rank(item, None, None, found.limits(item))
            for item in _by_rank(found)
            if not item.sample.devices
        ),
        run_dir=str(found.run_dir) if found.run_dir else None,
        missing=_NO_DESCRIPTORS if found.lacks_descriptors else None,
    )


@cache
def _version() -> str:
    """Return the installed version, which is parsed from the package's metadata only once."""
    return version("torchmem")


def _nvml(reason: str) -> NvmlState:
    if not reason:
        return NvmlState(up=True)
    words = reason_in_words(reason)
    text = f"{words[0].upper()}{words[1:]}."
    return NvmlState(up=False, reason=reason, text=text, step=next_step(reason))


_DIED: tuple[State, ...] = ("oom", "killed", "failed")
_URGENCY: tuple[State, ...] = (*_DIED, "stalled", "running", "exited")


def _rank_urgency(rank: RankState) -> tuple[int, bool, float]:
    """Return the position of a rank: the newest death first, the warned before the others."""
    died = -rank.sample_time if rank.state in _DIED else 0.0
    return _URGENCY.index(rank.state), not rank.why, died


def _by_rank(found: NodeReading) -> list[Published]:
    """Return the processes by run and rank."""
    return sorted(
        found.published,
        key=lambda item: (
            item.sample.process.run,
            item.sample.process.rank,
            -item.sample.timestamp,
        ),
    )


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A process on one device, its entry in the document, and whether it holds memory there."""

    item: Published
    device: DeviceSample
    state: RankState
    holds_memory: bool


def _gpus(found: NodeReading) -> Iterator[GpuState]:
    """Yield NVML's GPUs by index, then devices that only samples know."""
    ranks: dict[str, list[_OnDevice]] = {}
    uses = uses_by_process(found.reading)
    for item in _by_rank(found):
        for device in item.sample.devices:
            outside = found.outside.get((device.uuid or "", process_key(item.sample.process)))
            # A process that has reported its end holds its memory until it is gone.
            holds = item.state in LIVE_STATES or (
                item.attributed and (device.uuid or "", item.pid) in uses
            )
            state = _rank(item, device, outside, found.limits(item))
            entry = _OnDevice(item, device, state, holds)
            ranks.setdefault(device.uuid or "", []).append(entry)
    whole = {uuid: gpu for uuid, gpu in found.gpus.items() if gpu.uuid == uuid}
    values = _Values(found.reading)
    for gpu in sorted(whole.values(), key=lambda gpu: gpu.index):
        yield _gpu(found, values, gpu, ranks.pop(gpu.uuid, []))
    # MIG devices first: the rest may be what some user made up.
    for uuid, on_device in sorted(
        ranks.items(), key=lambda entry: (entry[0] not in found.gpus, entry[0])
    ):
        yield _other_device(uuid, found.gpus.get(uuid), on_device)


class _Values:
    """What NVML reported, by the UUID of the GPU."""

    def __init__(self, reading: Reading) -> None:
        self.memory = _by_uuid(reading, MemoryInfo)
        self.power = _by_uuid(reading, Power)
        self.temperature = _by_uuid(reading, Temperatures)
        self.utilization = _by_uuid(reading, Utilization)


def _by_uuid(reading: Reading, kind: type[V]) -> Mapping[str, V]:
    return {gpu.uuid: value for gpu, value in reading.values(kind)}


def _gpu(
    found: NodeReading, values: _Values, gpu: GpuIdentity, ranks: Sequence[_OnDevice]
) -> GpuState:
    memory = values.memory.get(gpu.uuid)
    power = values.power.get(gpu.uuid, Power())
    utilization = values.utilization.get(gpu.uuid, Utilization())
    temperature = values.temperature.get(gpu.uuid, Temperatures())
    is_up = not found.reading.down_reason and gpu.labels not in found.reading.unresponsive
    total = memory.total if memory else _total(ranks)
    return GpuState(
        uuid=gpu.uuid,
        up=is_up,
        parts=_parts(total, memory, ranks),
        ranks=_worst_first(ranks),
        index=gpu.index,
        name=gpu.name or _name(ranks),
        error_code=found.reading.lost.get(gpu.labels),
        total_bytes=total,
        temperature_celsius=temperature.sensors.get("gpu"),
        power_watts=power.watts,
        power_limit_watts=power.limit_watts,
        utilization_ratio=utilization.gpu,
        memory_utilization_ratio=utilization.memory,
    )


def _other_device(uuid: str, gpu: GpuIdentity | None, ranks: Sequence[_OnDevice]) -> GpuState:
    """Return a device from its samples alone: a MIG device, or any GPU without NVML."""
    total = _total(ranks)
    return GpuState(
        uuid=uuid,
        up=True,
        parts=_parts(total, None, ranks),
        ranks=_worst_first(ranks),
        index=gpu.index if gpu else None,
        name=_name(ranks),
        total_bytes=total,
    )


def _worst_first(ranks: Iterable[_OnDevice]) -> tuple[RankState, ...]:
    return tuple(sorted((entry.state for entry in ranks), key=_rank_urgency))


def _total(ranks: Sequence[_OnDevice]) -> int | None:
    """Return the device's memory according to its newest sample."""
    newest = sorted(ranks, key=lambda entry: (not entry.holds_memory, -entry.item.sample.timestamp))
    known = (plausible(entry.device.total_bytes) for entry in newest)
    return next((total for total in known if total is not None), None)


def _name(ranks: Iterable[_OnDevice]) -> str | None:
    return next((entry.device.name for entry in ranks if entry.device.name), None)


def _parts(
    total: int | None, memory: MemoryInfo | None, ranks: Sequence[_OnDevice]
) -> tuple[PartState, ...]:
    if total is None:
        return ()
    held = [entry.state.parts for entry in ranks if entry.holds_memory]
    free = _driver_free(ranks)
    if memory is None:
        return part_states(gpu_parts(total, held, free))
    free = memory.free if free is None else free
    return part_states(gpu_parts(total, held, free, memory.reserved or 0))


def _driver_free(ranks: Iterable[_OnDevice]) -> int | None:
    """Return what the driver had free when a running rank last read its statistics."""
    known = [
        (entry.device.stats_timestamp, entry.device.driver_free_bytes)
        for entry in ranks
        if entry.item.state == "running"
        and entry.device.stats_timestamp is not None
        and entry.device.driver_free_bytes is not None
    ]
    return max(known)[1] if known else None


def _rank(
    item: Published, device: DeviceSample | None, outside: int | None, limits: Limits
) -> RankState:
    process, steps = item.sample.process, item.sample.steps
    state = RankState(
        id=item.id,
        rank=process.rank,
        run=process.run,
        pid=item.pid,
        state=item.state,
        sample_time=item.sample.timestamp,
        launch=process.launch,
        start_time=process.start_timestamp,
        uid=item.uid,
        script=process.script,
        local_rank=process.local_rank,
        world_size=process.world_size,
        why=_why(item, device, limits),
        steps=steps.count or None,
        read_steps=steps.read_count,
        step_seconds=steps.mean_seconds,
    )
    if device is None:
        return state
    return msgspec.structs.replace(state, **_on_device(device, outside, limits))


def _why(item: Published, device: DeviceSample | None, limits: Limits) -> tuple[ThreatText, ...]:
    """Return how the process ended, or while it runs, what threatens it."""
    ended = ending(item.sample, item.state)
    if ended is not None:
        oom = device.last_oom if device and item.state == "oom" else None
        cause, onset = (oom.cause, oom.onset) if oom else (None, None)
        return (ThreatText(text=ended, cause=cause, onset=onset),)
    return rank_threats(item.sample, device, limits) if device else ()


def rank_threats(sample: Sample, device: DeviceSample, limits: Limits) -> tuple[ThreatText, ...]:
    """Return what threatens a rank that runs, the most urgent first."""
    found = threats(sample, device, limits)
    return tuple(ThreatText(text=item.text, cause=item.cause, onset=item.onset) for item in found)


def _on_device(device: DeviceSample, outside: int | None, limits: Limits) -> dict[str, object]:
    """Return the fields of `RankState` that are about one device."""
    counters, oom = device.counters, device.last_oom
    parts = rank_parts(device, outside)
    return {
        "parts": part_states(parts),
        "tensor_bytes": tensor_bytes(device, outside, parts),
        "outside_allocator_bytes": None if outside is None or outside < 0 else outside,
        "stats_time": device.stats_timestamp,
        "alloc_retries": counters.alloc_retries,
        "ooms": None if counters.ooms is None else {k: n for k, n in counters.ooms.items() if n},
        "last_oom": _last_oom(oom) if oom else None,
        **_allocator(device),
        **_layout(device, limits),
    }


def _allocator(device: DeviceSample) -> dict[str, object]:
    allocator = device.allocator
    if allocator is None:
        return {}
    return {
        "allocated_bytes": plausible(allocator.allocated_bytes.total),
        "active_bytes": plausible(allocator.active_bytes.total),
        "reserved_bytes": plausible(allocator.reserved_bytes.total),
        "allocated_peak_bytes": plausible(allocator.allocated_peak_bytes),
        "reserved_peak_bytes": plausible(allocator.reserved_peak_bytes),
    }


def _layout(device: DeviceSample, limits: Limits) -> dict[str, object]:
    layout = device.layout
    if layout is None:
        return {}
    return {
        "snapshot_time": layout.timestamp,
        "fragmentation_ratio": layout.fragmentation_ratio,
        "has_severe_fragmentation": is_severe(layout.fragmentation_ratio, limits),
        "headroom_bytes": layout.headroom_bytes,
        "headroom_flush_bytes": layout.headroom_flush_bytes,
        "stranded_bytes": layout.stranded_bytes,
        "releasable_bytes": layout.releasable_bytes,
        "largest_free_block_bytes": layout.largest_free_block_bytes,
    }


def _last_oom(oom: OomRecord) -> LastOom:
    return LastOom(
        timestamp=oom.timestamp,
        cause=oom.cause,
        requested_bytes=oom.requested_bytes,
        detail=oom.detail,
        onset=oom.onset,
        line=oom.line,
        function=oom.function,
    )
