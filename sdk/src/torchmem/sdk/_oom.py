"""One OutOfMemoryError, examined inside the allocator's observer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchmem.core.allocator_config import AllocatorConfig
from torchmem.core.backend import Backend
from torchmem.core.fragmentation import measure
from torchmem.core.headroom import Room
from torchmem.core.oom import OomFacts, classify, detail, free_blocks
from torchmem.core.sample import Allocator, Layout, Oom, OomDetail
from torchmem.core.snapshot import SegmentInfo
from torchmem.sdk._device import DeviceRecord


@dataclass(frozen=True, slots=True)
class Scene:
    """What is only known in the observer; fields as in `torchmem.core.report.OomReport`, `device` is torch's index."""

    device: int
    oom: Oom
    driver_free_bytes: int
    limit_bytes: int | None
    layout: Layout | None
    layout_before: Layout | None


@dataclass(frozen=True, slots=True)
class Observed:
    """The observer's arguments, in bytes: segment-rounded request, memory limit or device total, driver free."""

    requested: int
    limit: int
    driver_free: int


def examine(backend: Backend, record: DeviceRecord, config: AllocatorConfig, observed: Observed) -> Scene:
    """Measure what the allocator kept after it had returned its cache, name the cause and count it in `record`.

    `record` holds statistics of this moment.
    """
    index, now, segments = record.device.index, time.time(), backend.memory_snapshot()
    layout = None
    if segments is not None:
        room = Room(observed.driver_free, _reserved(record.allocator), observed.limit)
        layout = record.layout = measure(segments, index, now, room, config)
    facts = _facts(observed, record, layout, config)
    oom = Oom(now, observed.requested, classify(facts), _detail(backend, index, facts, segments))
    record.record_oom(oom)
    limit = facts.limit if facts.total is not None and facts.limit < facts.total else None
    return Scene(index, oom, observed.driver_free, limit, layout, record.periodic_layout)


def _reserved(allocator: Allocator | None) -> int:
    return allocator.reserved_bytes.total if allocator else 0


def _facts(observed: Observed, record: DeviceRecord, layout: Layout | None, config: AllocatorConfig) -> OomFacts:
    """Without a snapshot the pools cannot be told apart: every free byte counts as one of the default pools."""
    reserved = _reserved(record.allocator)
    unused = reserved - record.allocator.active_bytes.total if record.allocator else 0
    return OomFacts(
        requested=observed.requested,
        limit=observed.limit,
        driver_free=observed.driver_free,
        cached_free=layout.free_bytes if layout else unused,
        reserved=reserved,
        total=record.device.total_bytes,
        private_free=layout.private_free_bytes if layout else 0,
        large_segment=config.large_segment_size,
    )


def _detail(backend: Backend, device: int, facts: OomFacts, segments: Sequence[SegmentInfo] | None) -> OomDetail | None:
    if segments is None or classify(facts) != "fragmentation":
        return None
    return detail(facts, free_blocks(segments, device, facts.requested, backend.current_stream(device)))
