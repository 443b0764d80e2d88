"""Describe the state of a rank in words, from its latest sample, for terminals and web pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchmem.allocator.outside_memory import outside_at_start, outside_bytes, unbacked_bytes
from torchmem.allocator.settings import LAST_PARSED
from torchmem.allocator.sizes import format_index, format_size
from torchmem.explain.communicator_remedies import IDLE_SECONDS
from torchmem.explain.engine_arguments import arguments_of
from torchmem.explain.gpu_name import gpu_name
from torchmem.explain.growth import room_left
from torchmem.explain.headline import short_headline
from torchmem.explain.oom_report import format_seconds
from torchmem.sample.libraries import Communicator, held_bytes
from torchmem.sample.sample import (
    Allocator,
    DeviceSample,
    Layout,
    OomCause,
    Sample,
    State,
    live_state,
)

_ENDINGS: Mapping[State, str] = {
    "oom": "It died of an OutOfMemoryError.",
    "killed": "It was ended by a signal, without an exception.",
    "failed": "It ended with an exception that its script did not catch.",
    "exited": "It has ended normally.",
}


HOW_TO_COUNT_STEPS = (
    "In a loop without an optimizer of torch.optim, call session.step() after each step, in a "
    "server session.request()."
)


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known about one subject, in a few words."""

    subject: str
    text: str


def heading(
    sample: Sample, device: DeviceSample, now: float, gpu: int | None = None
) -> tuple[str, ...]:
    """Return who this is: the rank, its process, and its GPU, one line each.

    `gpu` is NVML's index.
    """
    process = sample.process
    of = f" of {process.world_size}" if process.world_size else ""
    script = f" ({process.script})" if process.script else ""
    launch = f", launch {process.launch}" if process.launch else ""
    state = sample.ended or live_state(sample, now)
    on = gpu_name(device.index, device.uuid, gpu)
    versions = (f"{name} {text}" for name, text in process.versions.items() if name != "python")
    return (
        f"run {process.run}{script}, rank {process.rank}{of}: {state}",
        f"pid {process.pid} on {process.hostname}{launch}, seen {_ago(sample.timestamp, now)}",
        "  ".join(filter(None, (on, device.name, *versions))),
    )


def rank_facts(sample: Sample, device: DeviceSample, now: float) -> tuple[Fact, ...]:
    """Return what is known about the rank on one device; unknown subjects are left out.

    `now` is in Unix seconds.
    """
    return (
        *memory_facts(device),
        *_engine(device),
        *_outside(device, now),
        *_communicators(device, now),
        *_rmm(device),
        *_cache(device, now),
        *_events(sample, device, now),
        *_host(sample, now),
        *settings_facts(sample.allocator_settings),
    )


def next_request(layout: Layout) -> str | None:
    """Return whether the next allocation would succeed, as a sentence; None if it is unknown."""
    headroom, flushed = layout.headroom_bytes, layout.headroom_flush_bytes
    if headroom is None or flushed is None:
        return None
    if flushed <= headroom:
        return f"An allocation of up to {format_size(headroom)} succeeds; a larger one fails."
    return (
        f"An allocation of up to {format_size(headroom)} succeeds at once, one of up to "
        f"{format_size(flushed)} after a flush of the cache; a larger one fails."
    )


def ending(sample: Sample, state: State) -> str | None:
    """Return how a process ended, as a sentence; None while it runs."""
    oom = next((device.last_oom for device in sample.devices if device.last_oom), None)
    if state == "oom" and oom:
        line = f" at {oom.line}" if oom.line else ""
        return f"It died of an OutOfMemoryError{line}: {short_headline(oom)}."
    return _ENDINGS.get(state)


def _ago(timestamp: float, now: float) -> str:
    return f"{format_seconds(now - timestamp)} ago"


def memory_facts(device: DeviceSample) -> Iterator[Fact]:
    """Yield the peaks, what they left free on the device, and the peaks of phases."""
    if device.allocator is None:
        return
    yield from _peaks(device.allocator)
    left = room_left(device)
    if left is not None:
        share = f" ({left / device.total_bytes:.1%} of the GPU)" if device.total_bytes else ""
        yield Fact("left at the peak", f"{format_size(left)}{share}")
    if device.phase_peaks:
        highest = sorted(device.phase_peaks.items(), key=lambda item: -item[1])
        yield Fact("phases", ", ".join(f"{name} {format_size(peak)}" for name, peak in highest))


def _peaks(allocator: Allocator) -> Iterator[Fact]:
    allocated, reserved = allocator.allocated_peak_bytes, allocator.reserved_peak_bytes
    if allocated is not None and reserved is not None:
        text = f"{format_size(allocated)} allocated, {format_size(reserved)} reserved"
        yield Fact("peaks", text)


def _engine(device: DeviceSample) -> Iterator[Fact]:
    """Yield what an inference engine holds, and what its KV cache could have."""
    engine = device.engine
    if engine is None:
        return
    held = [f"{part} {format_size(size)}" for part, size in engine.resident.items()]
    asleep = f"{format_size(engine.asleep_bytes)} asleep" if engine.asleep else ""
    yield Fact(f"engine {engine.name}", ", ".join(filter(None, [*held, asleep])))
    advice, planned = engine.kv_cache_advice_bytes, engine.planned.get("kv_cache")
    if advice is not None and planned is not None:
        argument = arguments_of(engine.name).cache_bytes.format(advice)
        sizes = f"{format_size(advice)} instead of {format_size(planned)}"
        fits = f"{argument} fits ({sizes})" if argument else f"{sizes} fits"
        yield Fact("KV cache", f"{fits}, by the requests so far")


def _outside(device: DeviceSample, now: float) -> Iterator[Fact]:
    """Yield what was outside the allocator at the first read, and the difference to now.

    Or how much of what it reserved is not on the device, such as in vLLM's sleep mode.
    """
    unbacked = unbacked_bytes(device, device.driver_free_bytes)
    if unbacked is not None:
        yield Fact(
            "returned",
            f"at least {format_size(unbacked)} of the reserved memory is not on the GPU: an "
            "allocator outside PyTorch has returned it to the driver, as in vLLM's sleep mode",
        )
    if device.managed_bytes:
        yield Fact(
            "managed memory",
            f"{format_size(device.managed_bytes)}, which the driver moves between the GPU and the "
            "host; NVML counts it as used by no process",
        )
    first, start = device.first_read, outside_at_start(device)
    outside = outside_bytes(device, device.driver_free_bytes)
    if first is not None and start is not None and outside is not None:
        change = outside - start
        more = f"{format_size(abs(change))} {'more' if change > 0 else 'less'}"
        yield Fact(
            "outside PyTorch",
            f"{format_size(start)} at the first read, {_ago(first.timestamp, now)}; "
            f"{more if change else 'as much'} now, including other processes",
        )


def _communicators(device: DeviceSample, now: float) -> Iterator[Fact]:
    """Yield what NCCL holds by process group, the largest first."""
    groups = device.communicators
    if not groups:
        return
    names = sorted(groups, key=lambda name: -groups[name].held_bytes)
    texts = [f"{name} {_communicator(groups[name], now)}" for name in names]
    yield Fact("NCCL", f"{format_size(held_bytes(groups.values()))}: {', '.join(texts)}")


def _rmm(device: DeviceSample) -> Iterator[Fact]:
    """Yield what RAPIDS' memory manager tells."""
    rmm = device.rmm
    if rmm is None:
        return
    sizes = {"pool": rmm.pool_bytes, "in use": rmm.used_bytes, "at its peak": rmm.peak_bytes}
    known = [f"{format_size(size)} {words}" for words, size in sizes.items() if size is not None]
    whose = "PyTorch's allocator" if rmm.serves_pytorch else "beside PyTorch's allocator"
    yield Fact("RMM", f"{', '.join(known)}; {whose}")


def _communicator(each: Communicator, now: float) -> str:
    if not each.is_counted:
        return f"{format_size(each.held_bytes)} (what grew outside PyTorch when it was created)"
    idle = now - each.idle_since if each.idle_since is not None else 0.0
    notes = (
        f"{format_size(each.suspendable_bytes)} can be suspended" * (each.suspendable_bytes > 0),
        f"{format_size(each.suspended_bytes)} is suspended" * (each.suspended_bytes > 0),
        f"no collective for {format_seconds(idle)}" * (idle >= IDLE_SECONDS),
    )
    known = ", ".join(filter(None, notes))
    return f"{format_size(each.held_bytes)}{f' ({known})' if known else ''}"


def _cache(device: DeviceSample, now: float) -> Iterator[Fact]:
    layout = device.layout
    if layout is None:
        return
    headroom, flushed = layout.headroom_bytes, layout.headroom_flush_bytes
    if headroom is not None and flushed is not None:
        after = f", {format_size(flushed)} after a flush of the cache" if flushed > headroom else ""
        yield Fact("largest request", f"{format_size(headroom)}{after}")
    yield Fact("cache", f"{_free(layout)}; {_snapshot_ago(layout, now)}")
    blocks = _blocks(layout)
    if blocks is not None:
        yield Fact("blocks", f"{blocks}; {_snapshot_ago(layout, now)}")


def _snapshot_ago(layout: Layout, now: float) -> str:
    """Return the age of a snapshot, which may be from the middle of a step."""
    return f"in the snapshot {_ago(layout.timestamp, now)}"


def _free(layout: Layout) -> str:
    releasable, stranded = format_size(layout.releasable_bytes), format_size(layout.stranded_bytes)
    shown = f"{releasable} releasable, {stranded} stranded beside live tensors"
    if layout.largest_free_block_bytes is None:
        return f"at most {shown}, as PyTorch has returned memory to the driver since it was counted"
    ratio = layout.fragmentation_ratio
    return shown if ratio is None else f"{shown}; fragmentation {format_index(ratio)}"


def _blocks(layout: Layout) -> str | None:
    """Return the number of blocks, None if it is unknown."""
    blocks, segments, largest = layout.blocks, layout.segments, layout.largest_free_block_bytes
    if blocks is None or segments is None or largest is None:
        return None
    return (
        f"{blocks.active_allocated.total:,} in use and {blocks.inactive.total:,} free in "
        f"{segments.total:,} segments, the largest free one {format_size(largest)}"
    )


def _events(sample: Sample, device: DeviceSample, now: float) -> Iterator[Fact]:
    counters, steps = device.counters, sample.steps
    if steps.count:
        mean = steps.mean_seconds
        each = f", {mean:.2f} s each" if mean else ""
        last = steps.last_timestamp
        newest = "" if last is None else f", the last one {_ago(last, now)}"
        yield Fact("steps", f"{steps.count:,}{each}{newest}")
    else:
        yield Fact("steps", f"none counted. {HOW_TO_COUNT_STEPS}")
    if counters.alloc_retries is not None:
        yield Fact("flushes", f"{counters.alloc_retries:,} of the whole cache, to retry a request")
    if counters.ooms is not None:
        yield Fact("OOMs", _ooms(device, counters.ooms, now))


def _ooms(device: DeviceSample, ooms: Mapping[OomCause, int], now: float) -> str:
    causes = ", ".join(f"{count:,} {cause}" for cause, count in ooms.items() if count)
    last = device.last_oom
    if not causes or last is None:
        return causes or "none"
    line = f" at {last.line}" if last.line else ""
    return f"{causes}; the last one{line}, {_ago(last.timestamp, now)}"


def _host(sample: Sample, now: float) -> Iterator[Fact]:
    host, pinned = sample.host, sample.pinned
    if host is not None:
        left, limit = host.available_bytes, host.limit_bytes
        known = left is not None and limit is not None
        of = f", {format_size(left or 0)} of {format_size(limit or 0)} left" if known else ""
        yield Fact("host memory", f"{format_size(host.rss_bytes)}{of}")
    if pinned is not None and pinned.used_bytes + pinned.cached_bytes:
        used, cached = format_size(pinned.used_bytes), format_size(pinned.cached_bytes)
        read = "" if pinned.timestamp is None else f"; read {_ago(pinned.timestamp, now)}"
        yield Fact("pinned", f"{used} used, {cached} cached{read}")


def settings_facts(settings: Mapping[str, str]) -> Iterator[Fact]:
    """Yield the allocator's backend and the settings that the process was given."""
    if settings:
        given = settings.get(LAST_PARSED) or "PyTorch's defaults"
        yield Fact("settings", f"{settings.get('backend', 'native')}, {given}")
