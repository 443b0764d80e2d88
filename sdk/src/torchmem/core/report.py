"""`OomReport`: the evidence of one OutOfMemoryError, one JSON file of a few KB in the run directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torchmem.core.errors import UsageError
from torchmem.core.sample import FREE_BLOCK_BOUNDS, DeviceSample, Layout, Oom, Process, Steps
from torchmem.core.untrusted import bounded, convert

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
    oom: Oom
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
        return 0 if allocator is None else max(0, allocator.reserved_bytes.total - allocator.active_bytes.total)

    @property
    def outside_bytes(self) -> int | None:
        """Bytes of the device that neither the driver had free nor this process's allocator held."""
        total, reserved = self.device.total_bytes, self.reserved_bytes
        return None if total is None or reserved is None else max(0, total - self.driver_free_bytes - reserved)


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
        return _consistent(convert(bounded(raw), OomReport))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not a sound OOM report: {error}.") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _consistent(report: OomReport) -> OomReport:
    layouts = [layout for layout in (report.layout, report.layout_before, report.device.layout) if layout]
    moments = [report.timestamp, report.oom.timestamp, *(layout.timestamp for layout in layouts)]
    if max(moments) > MAX_TIMESTAMP:
        raise ValueError("a time is out of bounds")
    if any(len(layout.free_block_counts) != len(FREE_BLOCK_BOUNDS) + 1 for layout in layouts):
        raise ValueError("a histogram has another number of buckets")
    if len({len(getattr(report.trend, column.name)) for column in fields(Trend)}) > 1:
        raise ValueError("the columns of the trend differ in length")
    return report
