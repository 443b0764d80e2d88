"""`OomReport`: the evidence of one OutOfMemoryError, one JSON file of a few KB in the run directory.

An OOM report in plain words: what was asked for, what was free where, and why it did not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torchmem.allocator.sizes import LARGE_BUFFER, format_size
from torchmem.sample.errors import UsageError
from torchmem.sample.sample import (
    FREE_BLOCK_BOUNDS,
    DeviceSample,
    Layout,
    OomCause,
    OomDetail,
    OomRecord,
    Process,
    Steps,
)
from torchmem.sample.untrusted import convert, sanitize_json

SCHEMA_VERSION = 1
MAX_TIMESTAMP = 1 << 37  # the year 6325, which every calendar function still takes


@dataclass(frozen=True, slots=True)
class Trend:
    """The minutes before the OOM, oldest first: each field has one value for each moment, None where unknown.

    `seconds`: how long before the OOM. The rest is what `Sample` calls by the same names; `headroom_bytes` is the
    headroom with a flush, `steps` the number of steps by then.
    """

    seconds: tuple[float, ...] = ()
    allocated_bytes: tuple[int | None, ...] = ()
    reserved_bytes: tuple[int | None, ...] = ()
    active_bytes: tuple[int | None, ...] = ()
    stranded_bytes: tuple[int | None, ...] = ()
    fragmentation_ratio: tuple[float | None, ...] = ()
    headroom_bytes: tuple[int | None, ...] = ()
    alloc_retries: tuple[int | None, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OomReport:
    """One OutOfMemoryError; bytes and Unix seconds.

    `device` and `steps` as they were published with it; `oom` what failed; `driver_free_bytes` and `limit_bytes` (None
    without a memory fraction) as the allocator told its observer; `layout` after the allocator had returned its cache;
    `layout_before` from the newest periodic snapshot, which still shows the cache.
    """

    timestamp: float
    process: Process
    device: DeviceSample
    oom: OomRecord
    driver_free_bytes: int
    limit_bytes: int | None
    layout: Layout | None
    layout_before: Layout | None
    steps: Steps = field(default_factory=Steps)
    allocator_settings: dict[str, str] = field(default_factory=dict)
    trend: Trend = Trend()
    schema: int = SCHEMA_VERSION

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that the allocator held after it had returned its cache."""
        return None if self.device.allocator is None else self.device.allocator.reserved_bytes.total

    @property
    def cached_free_bytes(self) -> int:
        """Free bytes that stayed in the allocator: of the default pools when there is a snapshot, else of all."""
        if self.layout is not None:
            return self.layout.free_bytes
        allocator = self.device.allocator
        return (
            0
            if allocator is None
            else max(0, allocator.reserved_bytes.total - allocator.active_bytes.total)
        )

    @property
    def outside_bytes(self) -> int | None:
        """Bytes of the device that neither the driver had free nor this process's allocator held."""
        total, reserved = self.device.total_bytes, self.reserved_bytes
        return (
            None
            if total is None or reserved is None
            else max(0, total - self.driver_free_bytes - reserved)
        )


def encode(report: OomReport) -> bytes:
    """One line of UTF-8 JSON that ends with a newline."""
    return json.dumps(asdict(report), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(data: bytes) -> OomReport:
    """The report; raises UsageError, a reason without a subject, for anything that the SDK does not write."""
    try:
        raw = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise UsageError("is not an OOM report: it holds no JSON.") from None
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if type(schema) is int and schema > SCHEMA_VERSION:
        raise UsageError("was written by a newer torchmem: run pip install --upgrade torchmem.")
    if schema != SCHEMA_VERSION:
        raise UsageError("is not an OOM report of torchmem.")
    try:
        return _consistent(convert(sanitize_json(raw), OomReport))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not a sound OOM report: {error}.") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _consistent(report: OomReport) -> OomReport:
    layouts = [
        layout for layout in (report.layout, report.layout_before, report.device.layout) if layout
    ]
    moments = [report.timestamp, report.oom.timestamp, *(layout.timestamp for layout in layouts)]
    if max(moments) > MAX_TIMESTAMP:
        raise ValueError("a time is out of bounds")
    if any(len(layout.free_block_counts) != len(FREE_BLOCK_BOUNDS) + 1 for layout in layouts):
        raise ValueError("a histogram has another number of buckets")
    if len({len(getattr(report.trend, column.name)) for column in fields(Trend)}) > 1:
        raise ValueError("the columns of the trend differ in length")
    return report


HEADLINES: dict[OomCause, str] = {
    "capacity": "too little memory, however arranged",
    "fragmentation": "enough free memory, but not in one piece",
    "limit": "the process reached its own memory limit",
    "external": "others hold the memory of the device",
}

FRAGMENTATION: dict[OomDetail, str] = {
    "stranded": "They lie beside live tensors, so PyTorch could not give their segments back to the driver.",
    "stream": "One of them is large enough, but belongs to another CUDA stream, and a block never changes its stream.",
    "pool": "What would fit is free in a pool that this request may not use: that of a CUDA graph or MemPool, or that "
    "of the other size class (tensors up to 1 MiB, or above).",
    "pending": "One of them is large enough, but waited for another stream when PyTorch searched; once it was free "
    "PyTorch asked only the driver (pytorch/pytorch#189504).",
    "small_segment": "PyTorch takes 20 MiB from the driver for any tensor of 1 to 10 MiB; the tensor alone might have "
    "fitted.",
}


def summary(report: OomReport) -> str:
    """The cause in one line, without a full stop."""
    return f"Out of memory: {report.oom.cause}, {HEADLINES[report.oom.cause]}"


def failure_reason(report: OomReport) -> tuple[str, ...]:
    """Why the request failed, in a few sentences with numbers."""
    asked = f"PyTorch asked the driver for {format_size(report.oom.requested_bytes)} on GPU {report.device.index}."
    cached, driver = format_size(report.cached_free_bytes), format_size(report.driver_free_bytes)
    free = f"With its cache returned, {driver} was free at the driver and {cached} in PyTorch's own free blocks."
    return (asked, free, *(sentence for sentence in _REASONS[report.oom.cause](report) if sentence))


def _capacity(report: OomReport) -> Sequence[str]:
    requested, total = report.oom.requested_bytes, report.device.total_bytes
    if total is not None and requested > total:
        return (f"That is more than the whole device has ({format_size(total)}).",)
    free = report.driver_free_bytes + report.cached_free_bytes
    missing = f"That is {format_size(requested - free)} too little." if requested > free else ""
    rounded = (
        "Tensors of 1 to 10 MiB take 20 MiB from the driver at once."
        if requested == LARGE_BUFFER
        else ""
    )
    return missing, _held(report), rounded


def _held(report: OomReport) -> str:
    allocator = report.device.allocator
    return f"Tensors held {format_size(allocator.allocated_bytes.total)}." if allocator else ""


def _fragmentation(report: OomReport) -> Sequence[str]:
    layout, kind = report.layout, report.oom.detail
    largest = (
        f"The largest of these blocks has {format_size(layout.largest_free_block_bytes)}."
        if layout
        else ""
    )
    return largest, FRAGMENTATION[kind] if kind else ""


def _limit(report: OomReport) -> Sequence[str]:
    limit, reserved = report.limit_bytes, report.reserved_bytes
    if limit is None or reserved is None:
        return ("The process had reached its memory fraction.",)
    share = (
        f" ({limit / report.device.total_bytes:.0%} of the device)"
        if report.device.total_bytes
        else ""
    )
    return (
        f"But the process may use {format_size(limit)}{share}, and held {format_size(reserved)} of it.",
    )


def _external(report: OomReport) -> Sequence[str]:
    if report.outside_bytes is None or report.reserved_bytes is None:
        return ()
    outside, own = format_size(report.outside_bytes), format_size(report.reserved_bytes)
    return (
        f"This process's PyTorch held {own} of the device.",
        f"{outside} was held outside of it: by other processes, or by libraries beside PyTorch.",
    )


_REASONS: dict[OomCause, Callable[[OomReport], Sequence[str]]] = {
    "capacity": _capacity,
    "fragmentation": _fragmentation,
    "limit": _limit,
    "external": _external,
}


def memory_breakdown(report: OomReport) -> list[tuple[str, int]]:
    """Where the device's memory was at the OOM, in bytes; sums to the device's total. Empty when unknown."""
    allocator, outside, layout = report.device.allocator, report.outside_bytes, report.layout
    if allocator is None or outside is None:
        return []
    active, private = allocator.active_bytes.total, layout.private_free_bytes if layout else 0
    named = [
        ("tensors", allocator.allocated_bytes.total),
        ("freed, waiting for a stream", active - allocator.allocated_bytes.total),
        ("free blocks of PyTorch", allocator.reserved_bytes.total - active - private),
        ("free in graph and MemPool pools", private),
        ("outside PyTorch's allocator", outside),
        ("free at the driver", report.driver_free_bytes),
    ]
    return [(name, size) for name, size in named if size > 0]


def preceding_events(report: OomReport) -> tuple[str, ...]:
    """How it came to that: the last minutes and the cache that was returned, in a few sentences."""
    return tuple(
        sentence for sentence in (_steps(report), _retries(report), _cache(report)) if sentence
    )


def _steps(report: OomReport) -> str:
    steps = report.steps
    if not steps.count or steps.last_timestamp is None:
        return "No step had been finished."
    ago = format_seconds(report.oom.timestamp - steps.last_timestamp)
    return f"{steps.count:,} step{'s' * (steps.count != 1)} had been finished, the last one {ago} before."


def _retries(report: OomReport) -> str:
    known = [count for count in report.trend.alloc_retries if count is not None]
    grown = known[-1] - known[0] if known else 0
    if grown <= 0:
        return ""
    times = "once" if grown == 1 else f"{grown:,} times"
    return f"In the minutes shown PyTorch had already emptied its whole cache {times} to find room (a retry)."


def _cache(report: OomReport) -> str:
    before = report.layout_before
    if before is None:
        return ""
    age = report.oom.timestamp - before.timestamp
    when = "Just before" if age < 1 else f"{format_seconds(age)} before"
    released, stranded = format_size(before.releasable_bytes), format_size(before.stranded_bytes)
    return (
        f"{when}, the cache held {released} that could be returned and {stranded} that could not."
    )


def format_seconds(seconds: float) -> str:
    """A duration as people say it: "0.3 s", "42 s", "4 min 50 s", "2 h 10 min"."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:,.0f} h {seconds % 3600 // 60:.0f} min"
