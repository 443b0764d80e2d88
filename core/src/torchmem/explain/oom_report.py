"""The OOM report: the evidence of one OutOfMemoryError as JSON, and its explanation in words.

The SDK writes each report as one file of a few KB in the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from torchmem.allocator.outside_memory import outside_bytes
from torchmem.allocator.sizes import LARGE_BUFFER, format_size
from torchmem.allocator.tensor_groups import TensorGroup
from torchmem.explain.call_stack import Origin
from torchmem.explain.garbage import Garbage
from torchmem.explain.gpu_name import gpu_name
from torchmem.explain.lines import Lines
from torchmem.explain.parts import PartBytes, device_parts
from torchmem.explain.verdict import Verdict
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
from torchmem.sample.untrusted import convert, sanitize_json, strict_json

SCHEMA_VERSION = 1
LIST_THEM = "run `torchmem why --list` for a list of reports."
MAX_TIMESTAMP = 1 << 37  # the year 6325, which all calendar functions accept


@dataclass(frozen=True, slots=True)
class OomTrend:
    """The minutes before the OOM, oldest first: one value per point in time, None if unknown.

    `seconds` is the time before the OOM, `steps` the number of steps finished by then, and
    `headroom_bytes` the headroom with a flush. The other fields are those of `Sample`.
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
    """One OutOfMemoryError, in bytes and Unix seconds.

    Attributes:
        device: the device as published with the error, like `process` and `steps`.
        driver_free_bytes: free memory at the driver, as the allocator reported it to its observer.
        limit_bytes: the memory fraction's limit, likewise; None without one.
        layout: the layout after the allocator had emptied its cache.
        layout_before: the layout of the latest periodic snapshot, which still includes the cache.
        origin: where in the program the memory was requested.
        lines: the lines that held the memory, if their stacks were recorded.
        tensors: the tensors of the device that are Python objects, in groups; empty if unknown.
        garbage: what a full collection has freed after the process had died of the OOM; None if
            nothing, or unknown.
        last_error_bytes: bytes of tensors that, at least, only the traceback of an earlier error
            keeps in `sys.last_traceback`; None if nothing.
        survived: whether the process is known to have gone on.
        gradients_enabled: whether autograd recorded where the memory was requested; None if that is
            unknown. In a backward pass and in an optimizer's step it usually does not.
        verdict: the cause, the onset, and what each change would have freed; None for a threat to
            a rank that runs, if nothing has changed in it.
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
    trend: OomTrend = OomTrend()
    origin: Origin | None = None
    lines: Lines | None = None
    tensors: tuple[TensorGroup, ...] = ()
    garbage: Garbage | None = None
    last_error_bytes: int | None = None
    survived: bool = False
    gradients_enabled: bool | None = None
    verdict: Verdict | None = None
    schema: int = SCHEMA_VERSION

    @property
    def reserved_bytes(self) -> int | None:
        """Reserved bytes after the allocator had emptied its cache."""
        return None if self.device.allocator is None else self.device.allocator.reserved_bytes.total

    @property
    def cached_free_bytes(self) -> int:
        """Free bytes left in the allocator: in the default pools, or in all without a snapshot."""
        if self.layout is not None:
            return self.layout.free_bytes
        allocator = self.device.allocator
        if allocator is None:
            return 0
        return max(0, allocator.reserved_bytes.total - allocator.active_bytes.total)

    @property
    def private_free_bytes(self) -> int:
        """Free bytes left in the pools of CUDA graphs and MemPools; 0 if they are unknown."""
        return self.layout.private_free_bytes if self.layout else 0

    @property
    def outside_bytes(self) -> int | None:
        """Bytes of the device that were neither free at the driver nor reserved by this process."""
        engine = self.device.engine if self.oom.at_wake_up else None
        asleep = engine.asleep_bytes if engine else None
        return outside_bytes(self.device, self.driver_free_bytes, asleep)


def encode(report: OomReport) -> bytes:
    """Return the report as one line of UTF-8 JSON."""
    return json.dumps(asdict(report), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(data: bytes) -> OomReport:
    """Return the report that `encode` wrote.

    Raises UsageError for anything else; its text completes a sentence that begins with the file.
    """
    if not data.strip():
        raise UsageError(f"is empty: {LIST_THEM}")
    try:
        raw = strict_json(data)
    except ValueError:
        raise UsageError(f"is not an OOM report: {LIST_THEM}") from None
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if type(schema) is int and schema > SCHEMA_VERSION:
        raise UsageError("was written by a newer torchmem: run pip install --upgrade torchmem.")
    if schema != SCHEMA_VERSION:
        raise UsageError(f"is not an OOM report: {LIST_THEM}")
    try:
        return _checked(convert(sanitize_json(raw), OomReport))
    except ValueError as error:
        raise UsageError(f"is not a valid OOM report ({error}): {LIST_THEM}") from None


def _checked(report: OomReport) -> OomReport:
    optional = (report.layout, report.layout_before, report.device.layout)
    layouts = [layout for layout in optional if layout]
    times = [report.timestamp, report.oom.timestamp, *(layout.timestamp for layout in layouts)]
    if max(times) > MAX_TIMESTAMP:
        raise ValueError("a time is out of bounds")
    counts = [layout.free_block_counts for layout in layouts]
    if any(count is not None and len(count) != len(FREE_BLOCK_BOUNDS) + 1 for count in counts):
        raise ValueError("a histogram has a wrong number of buckets")
    if len({len(getattr(report.trend, column.name)) for column in fields(OomTrend)}) > 1:
        raise ValueError("the columns of the trend differ in length")
    return report


CAUSE_SUMMARIES: dict[OomCause, str] = {
    "capacity": "the run needed more memory than the GPU has",
    "fragmentation": "enough free memory, but not in one piece",
    "limit": "the process reached its own memory limit",
    "external": "other processes hold the memory of the GPU",
    "pending": "a block that fits was still waiting for another stream",
    "library": "a library other than PyTorch got no memory from the driver",
}

FRAGMENTATION_REASONS: dict[OomDetail, str] = {
    "stranded": "They lie beside live tensors, so PyTorch could not return their segments to the "
    "driver.",
    "stream": "One of them is large enough, but it belongs to another CUDA stream, and a block "
    "never moves to another stream.",
    "pool": "The missing memory is free in a pool that this request cannot use: the pool of a CUDA "
    "graph or MemPool, or that of the other size class (tensors up to 1 MiB, or larger ones).",
    "small_segment": "PyTorch allocates 20 MiB from the driver for any tensor of 1 to 10 MiB. The "
    "tensor alone might have fit.",
}


def origin_lines(report: OomReport, gpu: int | None = None) -> list[str]:
    """Return the process, its GPU, and its versions, one line each; `gpu` is NVML's index."""
    process, device = report.process, report.device
    rank = f"rank {process.rank}" + (f" of {process.world_size}" if process.world_size else "")
    script = f" ({process.script})" if process.script else ""
    names = [name for name in ("torch", "cuda", "hip") if name in process.versions]
    on = [gpu_name(device.index, device.uuid, gpu), device.name or "", device.uuid or ""]
    lines = (
        f"run {process.run}{script}, {rank}, pid {process.pid} on {process.hostname}",
        "  ".join(word for word in on if word),
        "  ".join(f"{name} {process.versions[name]}" for name in names),
    )
    return [line for line in lines if line]


def failure_reason(report: OomReport, gpu: int | None = None) -> tuple[str, ...]:
    """Return why the request failed, in a few sentences with numbers; `gpu` is NVML's index."""
    name = gpu_name(report.device.index, report.device.uuid, gpu)
    if report.oom.at_wake_up:
        return tuple(_wake_up(report, name))
    if report.oom.cause == "library":
        return tuple(_library(report, name))
    requested = format_size(report.oom.requested_bytes or 0)
    cached, driver = format_size(report.cached_free_bytes), format_size(report.driver_free_bytes)
    request = f"PyTorch asked the driver for {requested} on {name}."
    free = (
        f"After PyTorch had emptied its cache, {driver} was free at the driver and {cached} in "
        "PyTorch's own free blocks."
    )
    return (request, free, *filter(None, _REASONS[report.oom.cause](report)))


def _in_pools(report: OomReport) -> str:
    if report.oom.detail != "pool" or not report.private_free_bytes:
        return ""
    size = format_size(report.private_free_bytes)
    return f"In the pools of CUDA graphs and MemPools, {size} is free."


def _capacity(report: OomReport) -> Sequence[str]:
    requested, total = report.oom.requested_bytes or 0, report.device.total_bytes
    if total is not None and requested > total:
        return (f"That is more than the total memory of the GPU ({format_size(total)}).",)
    missing = requested - report.driver_free_bytes - report.cached_free_bytes
    allocator = report.device.allocator
    held = format_size(allocator.allocated_bytes.total) if allocator else ""
    return (
        f"{format_size(missing)} was missing." if missing > 0 else "",
        f"Tensors held {held}." if held else "",
        "PyTorch allocates 20 MiB for any tensor of 1 to 10 MiB."
        if requested == LARGE_BUFFER
        else "",
    )


def _fragmentation(report: OomReport) -> Sequence[str]:
    layout, detail = report.layout, report.oom.detail
    largest = layout.largest_free_block_bytes if layout else None
    return (
        "" if largest is None else f"The largest of these blocks is {format_size(largest)}.",
        FRAGMENTATION_REASONS.get(detail, "") if detail else "",
        _in_pools(report),
        _limit_beside(report),
    )


def _limit_beside(report: OomReport) -> str:
    """Return how a memory limit kept the request from the driver, or "" without a limit."""
    limit, reserved = report.limit_bytes, report.reserved_bytes
    if limit is None or reserved is None:
        return ""
    left, most = format_size(max(0, limit - reserved)), _limit_size(report, limit)
    return (
        f"The process could take {left} of the driver's memory: its memory fraction limits it to "
        f"{most}."
    )


def _limit_size(report: OomReport, limit: int) -> str:
    total = report.device.total_bytes
    return format_size(limit) + (f" ({limit / total:.0%} of the GPU)" if total else "")


def _limit(report: OomReport) -> Sequence[str]:
    limit, reserved = report.limit_bytes, report.reserved_bytes
    if report.oom.detail == "driver":
        return ("The driver had enough, and refused it: a limit of its own was reached.",)
    if limit is None or reserved is None:
        return ("The process had reached its memory fraction.",)
    most, held = _limit_size(report, limit), format_size(reserved)
    return (f"The process may use {most}, and it already held {held}.",)


def _external(report: OomReport) -> Sequence[str]:
    if report.outside_bytes is None or report.reserved_bytes is None:
        return ()
    outside, own = format_size(report.outside_bytes), format_size(report.reserved_bytes)
    return (
        f"PyTorch held {own} in this process.",
        f"Other processes, or libraries other than PyTorch, held {outside}.",
    )


def _pending(report: OomReport) -> Sequence[str]:
    largest = report.layout.largest_free_block_bytes if report.layout else None
    size = "" if largest is None else f" ({format_size(largest)})"
    reason = (
        f"The largest of these blocks{size} fits the request, but still waited for another "
        "stream when PyTorch searched. When it became free, PyTorch asked only the driver "
        "(pytorch/pytorch#189504)."
    )
    return (reason,)


def _library(report: OomReport, gpu: str) -> Iterator[str]:
    requested, reserved = report.oom.requested_bytes, report.reserved_bytes
    size = "memory" if requested is None else format_size(requested)
    yield (
        f"A library such as NCCL, cuBLAS, cuDNN or Triton asked the driver for {size} on {gpu}, "
        "outside PyTorch's allocator."
    )
    yield f"The driver had {format_size(report.driver_free_bytes)} free."
    if reserved is not None and report.layout is not None:
        yield (
            f"PyTorch held {format_size(reserved)}, of which it could have released "
            f"{format_size(report.layout.releasable_bytes)}, but it does so only for its own "
            "requests."
        )


def _wake_up(report: OomReport, gpu: str) -> Iterator[str]:
    engine, missing = report.device.engine, report.oom.requested_bytes or 0
    name = engine.name if engine else "inference"
    yield (
        f"To wake up, the {name} engine was still to take {format_size(missing)} from the driver "
        f"on {gpu}, outside PyTorch's allocator."
    )
    yield f"The driver had {format_size(report.driver_free_bytes)} free."
    outside = report.outside_bytes
    if outside is not None:
        yield f"Other processes, or libraries other than PyTorch, held {format_size(outside)}."
    cached = report.layout.releasable_bytes if report.layout else 0
    if cached:
        yield f"PyTorch had cached {format_size(cached)} in this process."


_REASONS: Mapping[OomCause, Callable[[OomReport], Sequence[str]]] = {
    "capacity": _capacity,
    "fragmentation": _fragmentation,
    "limit": _limit,
    "external": _external,
    "pending": _pending,
}


def aftermath(report: OomReport, steps_since: int | None) -> str:
    """Return that the process went on, and for how many steps, in a sentence; "" if it did not.

    `steps_since`: steps that have ended since the error; None if unknown.
    """
    if not report.survived:
        return ""
    steps = steps_since and f": {steps_since:,} step{'s' * (steps_since != 1)} ended after it"
    return f"The process caught the error and went on{steps or ''}."


def memory_parts(report: OomReport) -> tuple[PartBytes, ...]:
    """Return the parts of the device's memory at the OOM, which add up to it; none if unknown."""
    return device_parts(replace(report.device, layout=report.layout), report.driver_free_bytes)


def preceding_events(report: OomReport) -> tuple[str, ...]:
    """Return what happened in the minutes before the OOM, and at its end, in a few sentences."""
    sentences = _steps, _retries, _cache, _last_error, _garbage
    return tuple(filter(None, (sentence(report) for sentence in sentences)))


def _steps(report: OomReport) -> str:
    steps = report.steps
    if not steps.count or steps.last_timestamp is None:
        return "No step was counted."
    ago = format_seconds(report.oom.timestamp - steps.last_timestamp)
    return (
        f"{steps.count:,} step{'s' * (steps.count != 1)} had finished, the last one {ago} earlier."
    )


def _retries(report: OomReport) -> str:
    counts = [count for count in report.trend.alloc_retries if count is not None]
    increase = counts[-1] - counts[0] if counts else 0
    if increase <= 0:
        return ""
    times = "once" if increase == 1 else f"{increase:,} times"
    return f"In the minutes shown, PyTorch emptied its whole cache {times} to retry an allocation."


def _cache(report: OomReport) -> str:
    before = report.layout_before
    if before is None:
        return ""
    age = report.oom.timestamp - before.timestamp
    when = "Just before" if age < 1 else f"{format_seconds(age)} earlier"
    releasable, stranded = format_size(before.releasable_bytes), format_size(before.stranded_bytes)
    return (
        f"{when}, the cache held {releasable} that could be released and {stranded} that could not."
    )


def _last_error(report: OomReport) -> str:
    if report.last_error_bytes is None:
        return ""
    size = format_size(report.last_error_bytes)
    return f"The traceback of an earlier error (sys.last_traceback) kept {size} of tensors."


def _garbage(report: OomReport) -> str:
    garbage = report.garbage
    if garbage is None or report.oom.onset == "garbage":  # which the headline says
        return ""
    off = ", which the script had switched off," if garbage.is_collector_off else ""
    freed = f"freed {format_size(garbage.bytes)} of tensors in reference cycles{garbage.origin}"
    return f"After the error, Python's collector{off} {freed}."


def format_seconds(seconds: float) -> str:
    """Format a duration: "0.3 s", "42 s", "4 min 50 s", "2 h 10 min"."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)  # rounded down, so that no text says "60 s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"
