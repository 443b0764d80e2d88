"""`Sample`: one process's allocator state on its devices, the noun that travels from SDK to exporter.

All fields are plain numbers and strings. `None` means unknown or unsupported and is never exported.

Whether a living process still trains.

A sample as JSON bytes; unknown values are null. Reading back, with distrust, is the exporter's part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

OomCause = Literal["capacity", "fragmentation", "limit", "external"]
OomDetail = Literal["stranded", "stream", "pool", "pending", "small_segment"]
Ending = Literal["exited", "oom"]
State = Literal["running", "stalled", "exited", "oom", "killed"]

OOM_CAUSES: tuple[OomCause, ...] = ("capacity", "fragmentation", "limit", "external")
LIVE_STATES: tuple[State, ...] = ("running", "stalled")
STATES: tuple[State, ...] = (*LIVE_STATES, "exited", "oom", "killed")

# Upper bounds in bytes of the free-block histogram: from one page to the largest block a card can hold.
FREE_BLOCK_BOUNDS: tuple[int, ...] = (1 << 12, 1 << 16, *(1 << power for power in range(20, 36)))

# Upper bounds in seconds of the step-duration histogram.
STEP_DURATION_BOUNDS: tuple[float, ...] = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True, slots=True)
class ByPool:
    """A count or a number of bytes, for the allocator's small (blocks ≤ 1 MiB) and large pool.

    `undivided` stands in for the two where the allocator has no such pools (backend:cudaMallocAsync).
    """

    small: int | None
    large: int | None
    undivided: int | None = None

    @property
    def total(self) -> int:
        """Sum over both pools."""
        return sum(value for _, value in self.parts())

    def parts(self) -> list[tuple[str, int]]:
        """What is known, by the value of the label `pool`; the undivided sum has none."""
        named = (("small", self.small), ("large", self.large), ("", self.undivided))
        return [(pool, value) for pool, value in named if value is not None]


@dataclass(frozen=True, slots=True)
class Allocator:
    """Current and peak bytes of one device, from `torch.cuda.memory_stats_as_nested_dict()`."""

    allocated_bytes: ByPool
    active_bytes: ByPool
    reserved_bytes: ByPool
    requested_bytes: ByPool | None
    inactive_split_bytes: ByPool | None
    allocated_peak_bytes: int
    active_peak_bytes: int
    reserved_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Counters:
    """Events of one device since the process started; they never go back when the user resets PyTorch's own.

    `releases`, `released_bytes`: what the setting `release` did; None without it. `ooms` is None where the allocator
    does not tell of them.
    """

    alloc_retries: int | None = None
    oom_rejections: int | None = None
    device_allocs: int | None = None
    device_frees: int | None = None
    stream_syncs: int | None = None
    releases: int | None = None
    released_bytes: int | None = None
    ooms: dict[OomCause, int] | None = None


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks by state, from the snapshot's `state` field."""

    active_allocated: ByPool
    active_pending_free: ByPool
    inactive: ByPool


@dataclass(frozen=True, slots=True)
class Layout:
    """What one memory snapshot says about the default pools of one device; bytes, `timestamp` in Unix seconds."""

    timestamp: float
    segments: ByPool
    blocks: BlockCounts
    releasable_bytes: int
    stranded_bytes: int
    largest_free_block_bytes: int
    free_block_counts: tuple[int, ...]
    private_used_bytes: int
    private_free_bytes: int
    headroom_bytes: int | None
    headroom_flush_bytes: int | None

    @property
    def free_bytes(self) -> int:
        """Cached free bytes: releasable plus stranded."""
        return self.releasable_bytes + self.stranded_bytes

    @property
    def fragmentation_ratio(self) -> float | None:
        """FI = 1 − largest free block / free bytes; None when nothing is free."""
        if self.free_bytes == 0:
            return None
        return 1 - self.largest_free_block_bytes / self.free_bytes


@dataclass(frozen=True, slots=True)
class OomRecord:
    """The newest OutOfMemoryError of one device: Unix seconds, and the segment-rounded bytes it asked for.

    `detail`: what kind of fragmentation it was, where that is the cause.
    """

    timestamp: float
    requested_bytes: int
    cause: OomCause
    detail: OomDetail | None = None


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device of the process: torch's index for it, its UUID as NVML writes it, its memory.

    `phase_peaks`: highest allocated bytes within each phase that the script named.
    """

    index: int
    uuid: str | None
    name: str | None
    total_bytes: int | None
    allocator: Allocator | None = None
    counters: Counters = Counters()
    layout: Layout | None = None
    last_oom: OomRecord | None = None
    phase_peaks: dict[str, int] = field(default_factory=dict)


def distinct_devices(devices: Iterable[DeviceSample]) -> tuple[DeviceSample, ...]:
    """The first device of each UUID; a second one, or a second one without a UUID, could not be told apart."""
    first: dict[str | None, DeviceSample] = {}
    for device in devices:
        first.setdefault(device.uuid, device)
    return tuple(first.values())


@dataclass(frozen=True, slots=True)
class Steps:
    """Optimizer steps seen: their number, the seconds between them by bucket and in sum, samples reported.

    `last_timestamp`: when the last one ended, Unix seconds.
    """

    count: int = 0
    duration_counts: tuple[int, ...] = (0,) * (len(STEP_DURATION_BOUNDS) + 1)
    duration_sum_seconds: float = 0.0
    samples: int | None = None
    last_timestamp: float | None = None


@dataclass(frozen=True, slots=True)
class SelfCost:
    """What the SDK itself spent: seconds of the newest reads, CPU seconds in sum, swallowed errors by stage.

    `oom_duration_seconds`: how long the newest OutOfMemoryError was held up to write its evidence.
    """

    stats_duration_seconds: float | None = None
    snapshot_duration_seconds: float | None = None
    cpu_seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    oom_duration_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """Who wrote the sample. `pid` counts in the pid namespace `pid_namespace` (inode of /proc/self/ns/pid).

    `start_ticks` is field 22 of /proc/PID/stat (clock ticks since boot): with the pid it names one process for ever.
    `labels` holds scheduler ids such as slurm_job_id; `versions` holds torch, cuda, python, allocator backend.
    """

    pid: int
    pid_namespace: int | None
    start_ticks: int | None
    hostname: str
    run: str
    rank: int
    local_rank: int | None = None
    world_size: int | None = None
    script: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything one process publishes at one moment (`timestamp`, Unix seconds).

    `oom_pending`: an OutOfMemoryError was raised and no step has finished since. `ended`: the process said that it
    ends. `metrics_url`: where it serves its own endpoint, when asked to. `stall_after_seconds`: how long it may go
    without a step before it counts as stalled. `settings_ignored`: the allocator settings in
    the environment, and whether PyTorch ignored them; without those for which nobody can tell.
    """

    timestamp: float
    process: Process
    devices: tuple[DeviceSample, ...] = ()
    steps: Steps = Steps()
    cost: SelfCost = SelfCost()
    allocator_settings: dict[str, str] = field(default_factory=dict)
    settings_ignored: dict[str, bool] = field(default_factory=dict)
    oom_pending: bool = False
    ended: Ending | None = None
    metrics_url: str | None = None
    stall_after_seconds: float | None = None
    schema: int = SCHEMA_VERSION


def live_state(sample: Sample, now: float) -> Literal["running", "stalled"]:
    """`stalled` when no step came for longer than the process itself said, after it had been stepping.

    `now` in Unix seconds. It is judged by the time of the last step, so a process that hangs with the GIL held, and
    therefore publishes nothing more, is found too.
    """
    last, patience = sample.steps.last_timestamp, sample.stall_after_seconds
    silent = last is not None and patience is not None and now - last > patience
    return "stalled" if silent else "running"


def _fields(part: Any) -> dict[str, Any]:
    """One dataclass by field name. `dataclasses.asdict` would copy everything below it too, at four times the cost."""
    return {name: getattr(part, name) for name in part.__slots__}


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_fields)


def encode(sample: Sample) -> bytes:
    """One line of UTF-8 JSON that ends with a newline; raises ValueError for NaN and infinity."""
    return _ENCODER.encode(sample).encode() + b"\n"
