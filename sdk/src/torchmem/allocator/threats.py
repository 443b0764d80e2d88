"""What threatens a running rank, by its latest sample, and what to set against it.

The thresholds are those of the alerts (rules/thresholds.yml). Alerts also look at the minutes
before, so they are fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from torchmem.allocator.memory_use import outside_bytes
from torchmem.allocator.oom_cause import CONTEXT_ALLOWANCE_BYTES
from torchmem.allocator.oom_report import OomReport
from torchmem.allocator.remedies import Remedy, remedies
from torchmem.allocator.sizes import GIB, MIB, ROUND_LARGE, format_size
from torchmem.sample.sample import DeviceSample, Layout, OomCause, OomDetail, OomRecord, Sample

STRANDED_RATIO = 0.05
STRANDED_BYTES = GIB
HEADROOM_RATIO = 0.03
NEAR_CAPACITY_RATIO = 0.03
GPU_LIBRARY_BYTES = 512 * MIB
LIBRARY_RELEASABLE_BYTES = GIB
HOST_AVAILABLE_RATIO = 0.05

MAX_REMEDIES = 3


@dataclass(frozen=True, slots=True)
class Threat:
    """One thing that may end the run or slow it down; `cause` is that of the OOM to expect."""

    text: str
    cause: OomCause | None = None


def threats(sample: Sample, device: DeviceSample) -> tuple[Threat, ...]:
    """Return what threatens a rank on one of its devices, the most urgent first."""
    return tuple(
        threat
        for find in (_failed, _fragmentation, _capacity, _libraries, _retries, _host, _ignored)
        for threat in find(sample, device)
    )


def advice(sample: Sample, device: DeviceSample) -> tuple[Remedy, ...]:
    """Return what to do, at most MAX_REMEDIES: the most promising for each threat, then others."""
    causes = dict.fromkeys(threat.cause for threat in threats(sample, device))
    lists = [remedies(_next_oom(sample, device, cause)) for cause in causes if cause is not None]
    by_place = (remedy for place in zip_longest(*lists) for remedy in place if remedy is not None)
    found = {remedy.text: remedy for remedy in by_place}
    return tuple(found.values())[:MAX_REMEDIES]


def _next_oom(sample: Sample, device: DeviceSample, cause: OomCause) -> OomReport:
    """Return the report that the smallest request would leave that does not succeed now."""
    layout = device.layout
    headroom = layout.headroom_flush_bytes if layout else None
    detail: OomDetail | None = "stranded" if cause == "fragmentation" else None
    return OomReport(
        timestamp=sample.timestamp,
        process=sample.process,
        device=device,
        oom=OomRecord(sample.timestamp, (headroom or 0) + ROUND_LARGE, cause, detail),
        driver_free_bytes=device.driver_free_bytes or 0,
        limit_bytes=None,
        layout=layout,
        layout_before=layout,
        steps=sample.steps,
        allocator_settings=sample.allocator_settings,
    )


def _failed(sample: Sample, device: DeviceSample) -> Iterator[Threat]:
    if sample.oom_pending and device.last_oom:
        line = f" at {device.last_oom.line}" if device.last_oom.line else ""
        text = f"An allocation has failed{line} and no step has ended since: run `torchmem oom`."
        yield Threat(text, device.last_oom.cause)


def _is_below(size: int | None, ratio: float, device: DeviceSample) -> bool:
    return size is not None and device.total_bytes is not None and size < ratio * device.total_bytes


def _is_stranded(layout: Layout, device: DeviceSample) -> bool:
    stranded = layout.stranded_bytes
    return stranded >= STRANDED_BYTES and not _is_below(stranded, STRANDED_RATIO, device)


def _fragmentation(_: Sample, device: DeviceSample) -> Iterator[Threat]:
    layout = device.layout
    if layout and _is_stranded(layout, device):
        headroom = layout.headroom_bytes
        if headroom is not None and _is_below(headroom, HEADROOM_RATIO, device):
            yield Threat(
                f"{format_size(layout.stranded_bytes)} is free but lies beside live tensors, and "
                f"a request above {format_size(headroom)} has to flush the cache.",
                "fragmentation",
            )


def _capacity(_: Sample, device: DeviceSample) -> Iterator[Threat]:
    layout = device.layout
    headroom = layout.headroom_flush_bytes if layout else None
    if headroom is None or not _is_below(headroom, NEAR_CAPACITY_RATIO, device):
        return
    outside = outside_bytes(device, device.driver_free_bytes) or 0
    foreign = outside - CONTEXT_ALLOWANCE_BYTES
    if foreign > 0 and not _is_below(foreign, NEAR_CAPACITY_RATIO, device):
        held = f", while {format_size(outside)} is held outside PyTorch's allocator"
        cause: OomCause = "external"
    else:
        held, cause = "", "capacity"
    yield Threat(
        f"Nearly full: no request above {format_size(headroom)} succeeds, even after a flush of "
        f"the cache{held}.",
        cause,
    )


def _libraries(_: Sample, device: DeviceSample) -> Iterator[Threat]:
    layout, free = device.layout, device.driver_free_bytes
    releasable = layout.releasable_bytes if layout else 0
    if free is not None and free < GPU_LIBRARY_BYTES and releasable >= LIBRARY_RELEASABLE_BYTES:
        yield Threat(
            f"The driver has {format_size(free)} left for libraries such as NCCL, while PyTorch "
            f"caches {format_size(releasable)} in whole segments.",
            "library",
        )


def _retries(sample: Sample, device: DeviceSample) -> Iterator[Threat]:
    retries, steps = device.counters.alloc_retries or 0, sample.steps.count
    if retries:
        often = f", in {steps:,} steps" if steps else ""
        times = "once" if retries == 1 else f"{retries:,} times"
        yield Threat(f"PyTorch has emptied its whole cache {times} to retry an allocation{often}.")


def _host(sample: Sample, _: DeviceSample) -> Iterator[Threat]:
    host = sample.host
    if host is None or host.limit_bytes is None or host.available_bytes is None:
        return
    if host.available_bytes < HOST_AVAILABLE_RATIO * host.limit_bytes:
        yield Threat(
            f"Host memory is almost full: {format_size(host.available_bytes)} of "
            f"{format_size(host.limit_bytes)} is left."
        )


def _ignored(sample: Sample, _: DeviceSample) -> Iterator[Threat]:
    names = [name for name, ignored in sample.settings_ignored.items() if ignored]
    if names:
        yield Threat(f"PyTorch has ignored these allocator settings: {', '.join(names)}.")
