"""Compute the state of a node from what one collection has found.

The page at `/` draws it, and `/api/v1/state` serves it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from torchmem.explain.parts import (
    GROUPS,
    LEGEND,
    PartBytes,
    gpu_parts,
    plausible,
    rank_parts,
    tensor_bytes,
)
from torchmem.explain.rank_report import ending
from torchmem.explain.threats import Threat, is_severe, threats
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
from torchmem.node.state import GpuState, LastOom, NodeState, NvmlState, RankState
from torchmem.sample.sample import LIVE_STATES, DeviceSample, State

_NO_DESCRIPTORS = (
    "Ranks are missing, because the exporter has no file descriptor left: raise its limit "
    "(LimitNOFILE= of its unit, or ulimit -n), and restart it."
)


def node_state(found: NodeReading) -> NodeState:
    """Return the state of the node."""
    return NodeState(
        time=found.time,
        node=platform.node(),
        version=_version(),
        nvml=_nvml(found.reading.down_reason),
        legend=LEGEND,
        groups=GROUPS,
        gpus=tuple(_gpus(found)),
        waiting=tuple(
            _rank(item, _why(item, None, found.limits(item)), {})
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


def _urgency(entry: _OnDevice) -> tuple[int, bool, float]:
    """Return the position of a rank: the newest death first, the warned before the others."""
    item = entry.item
    died = -item.sample.timestamp if item.state in _DIED else 0.0
    return _URGENCY.index(item.state), not entry.state.why, died


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
            limits = found.limits(item)
            known = _on_device(device, outside, limits)
            state = _rank(item, _why(item, device, limits), known)
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
    return tuple(entry.state for entry in sorted(ranks, key=_urgency))


def _total(ranks: Sequence[_OnDevice]) -> int | None:
    """Return the device's memory according to its newest sample."""
    newest = sorted(ranks, key=lambda entry: (not entry.holds_memory, -entry.item.sample.timestamp))
    known = (plausible(entry.device.total_bytes) for entry in newest)
    return next((total for total in known if total is not None), None)


def _name(ranks: Iterable[_OnDevice]) -> str | None:
    return next((entry.device.name for entry in ranks if entry.device.name), None)


def _parts(
    total: int | None, memory: MemoryInfo | None, ranks: Sequence[_OnDevice]
) -> tuple[PartBytes, ...]:
    if total is None:
        return ()
    held = [entry.state.parts for entry in ranks if entry.holds_memory]
    free = _driver_free(ranks)
    if memory is None:
        return gpu_parts(total, held, free)
    free = memory.free if free is None else free
    return gpu_parts(total, held, free, memory.reserved or 0)


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


def _rank(item: Published, why: tuple[Threat, ...], on_device: dict[str, Any]) -> RankState:
    process, steps = item.sample.process, item.sample.steps
    return RankState(
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
        why=why,
        steps=steps.count or None,
        read_steps=steps.read_count,
        step_seconds=steps.mean_seconds,
        **on_device,
    )


def _why(item: Published, device: DeviceSample | None, limits: Limits) -> tuple[Threat, ...]:
    """Return how the process ended, or while it runs, what threatens it."""
    ended = ending(item.sample, item.state)
    if ended is not None:
        oom = device.last_oom if device and item.state == "oom" else None
        return (Threat("ended", ended, oom.cause, oom.onset) if oom else Threat("ended", ended),)
    return threats(item.sample, device, limits) if device else ()


def _on_device(device: DeviceSample, outside: int | None, limits: Limits) -> dict[str, Any]:
    """Return the fields of `RankState` that are about one device."""
    counters, oom = device.counters, device.last_oom
    parts = rank_parts(device, outside)
    return {
        "parts": parts,
        "tensor_bytes": tensor_bytes(device, outside, parts),
        "outside_allocator_bytes": None if outside is None or outside < 0 else outside,
        "stats_time": device.stats_timestamp,
        "alloc_retries": counters.alloc_retries,
        "ooms": None if counters.ooms is None else {k: n for k, n in counters.ooms.items() if n},
        "last_oom": LastOom.of(oom) if oom else None,
        **_allocator(device),
        **_layout(device, limits),
    }


def _allocator(device: DeviceSample) -> dict[str, Any]:
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


def _layout(device: DeviceSample, limits: Limits) -> dict[str, Any]:
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
