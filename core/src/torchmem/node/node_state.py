"""Compute the state of a node from its ranks, and from what NVML tells if it was asked."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import Any

from torchmem.allocator.outside_memory import is_limited
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
from torchmem.host.process_table import process_key
from torchmem.node.gpu_notes import gpu_notes
from torchmem.node.published import NodeRanks, Published
from torchmem.node.state import GpuState, LastOom, NodeState, NvmlState, RankState
from torchmem.sample.sample import LIVE_STATES, DeviceSample, State


@dataclass(frozen=True, slots=True)
class NvmlValues:
    """What only NVML tells about a node; nothing if it was not asked.

    `gpus`: the whole GPUs in order, without ranks and parts. `unused_bytes`: by UUID, what each
    has free and what the driver keeps for itself.
    """

    state: NvmlState = field(default_factory=NvmlState)
    gpus: Sequence[GpuState] = ()
    unused_bytes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def node_state(found: NodeRanks, nvml: NvmlValues) -> NodeState:
    """Return the state of the node."""
    return NodeState(
        time=found.time,
        node=platform.node(),
        version=_version(),
        nvml=nvml.state,
        legend=LEGEND,
        groups=GROUPS,
        gpus=tuple(_gpus(found, nvml)),
        waiting=tuple(
            _rank(item, _why(item, None, found.limits(item)), {})
            for item in _by_rank(found)
            if not item.sample.devices
        ),
        run_dir=str(found.run_dir) if found.run_dir else None,
        missing=found.missing,
    )


@cache
def _version() -> str:
    """Return the installed version, which is parsed from the package's metadata only once."""
    return version("torchmem")


_DIED: tuple[State, ...] = ("oom", "killed", "failed")
_URGENCY: tuple[State, ...] = (*_DIED, "stalled", "running", "exited")


def _urgency(entry: _OnDevice) -> tuple[int, bool, float]:
    """Return the position of a rank: the newest death first, the warned before the others."""
    item = entry.item
    died = -item.sample.timestamp if item.state in _DIED else 0.0
    return _URGENCY.index(item.state), not entry.state.why, died


def _by_rank(found: NodeRanks) -> list[Published]:
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


def _gpus(found: NodeRanks, nvml: NvmlValues) -> Iterator[GpuState]:
    """Yield NVML's GPUs, then devices that only samples know."""
    ranks: dict[str, list[_OnDevice]] = {}
    for item in _by_rank(found):
        for device in item.sample.devices:
            entry = _on_device(found, item, device)
            ranks.setdefault(device.uuid or "", []).append(entry)
    for gpu in nvml.gpus:
        noted = replace(gpu, notes=gpu_notes(found, gpu.uuid))
        dead = sum(process.bytes for process in found.holders.dead.get(gpu.uuid, ()))
        unused = nvml.unused_bytes.get(gpu.uuid)
        yield _with_ranks(noted, ranks.pop(gpu.uuid, []), unused, dead)
    # MIG devices first: the rest may be what some user made up.
    for uuid, entries in sorted(
        ranks.items(), key=lambda each: (each[0] not in found.gpus, each[0])
    ):
        mig = GpuState(uuid, index=found.gpus.get(uuid), notes=gpu_notes(found, uuid))
        yield _with_ranks(mig, entries, None)


def _on_device(found: NodeRanks, item: Published, device: DeviceSample) -> _OnDevice:
    uuid, limits = device.uuid or "", found.limits(item)
    outside = found.outside.get((uuid, process_key(item.sample.process)))
    # A process that has reported its end holds its memory until it is gone.
    is_held = item.attributed and (uuid, item.pid) in found.holders.held
    holds = item.state in LIVE_STATES or is_held
    known = _fields(device, outside, limits)
    return _OnDevice(item, device, _rank(item, _why(item, device, limits), known), holds)


def _with_ranks(
    gpu: GpuState, ranks: Sequence[_OnDevice], unused: tuple[int, int] | None, dead: int = 0
) -> GpuState:
    """Return a device with its ranks, and with what only they tell where NVML does not."""
    total = _total(ranks) if gpu.total_bytes is None else gpu.total_bytes
    if any(entry.device.shares_host_memory and entry.holds_memory for entry in ranks):
        total, unused = _total(ranks), None  # NVML may report a part of the host's memory
    return replace(
        gpu,
        parts=_parts(total, unused, ranks, dead),
        ranks=_worst_first(ranks),
        name=gpu.name or _name(ranks),
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
    total: int | None, unused: tuple[int, int] | None, ranks: Sequence[_OnDevice], dead: int
) -> tuple[PartBytes, ...]:
    if total is None:
        return ()
    held = [entry.state.parts for entry in ranks if entry.holds_memory]
    card = total - unused[1] if unused else None
    free = _driver_free(entry for entry in ranks if not is_limited(entry.device, card))
    if unused is None:
        return gpu_parts(total, held, free, dead=dead)
    return gpu_parts(total, held, unused[0] if free is None else free, unused[1], dead)


def _driver_free(ranks: Iterable[_OnDevice]) -> int | None:
    """Return what the driver had free when a running rank last read its statistics."""
    # What was free when a process ended is out of date: it gave its own memory back after that.
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


def _fields(device: DeviceSample, outside: int | None, limits: Limits) -> dict[str, Any]:
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
