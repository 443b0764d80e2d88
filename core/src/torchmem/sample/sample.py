"""`Sample`: the state of one process's allocator on its devices, which the SDK publishes.

Fields are plain numbers, strings and tuples or mappings of them. `None` means unknown or
unsupported and is never exported. `encode` writes a sample as JSON, `decode` reads it; the
exporter has a faster and stricter decoder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from torchmem.sample.engine import Engine, too_long
from torchmem.sample.launch import is_launch
from torchmem.sample.libraries import MAX_GROUPS, Communicator, RmmMemory
from torchmem.sample.release_tiers import ReleaseTier
from torchmem.sample.remedy_words import RemedyKind
from torchmem.sample.run_directory import MAX_SAMPLE_BYTES
from torchmem.sample.run_history import Growth, RunHistory
from torchmem.sample.untrusted import UntrustedFileError, convert, read_untrusted, sanitize_json
from torchmem.sample.validity import Fault, without_impossible

SCHEMA_VERSION = 1

OomCause = Literal["capacity", "fragmentation", "limit", "external", "pending", "library"]
OomDetail = Literal["stranded", "stream", "pool", "small_segment", "driver"]
Onset = Literal[
    "first_step", "leak", "garbage", "larger_step", "new_phase", "outside", "stranded", "tight"
]
Ending = Literal["exited", "failed", "oom"]
State = Literal["running", "stalled", "exited", "failed", "oom", "killed"]
HookFault = Literal["raised", "slow", "empty"]

OOM_CAUSES: tuple[OomCause, ...] = get_args(OomCause)
ONSETS: tuple[Onset, ...] = get_args(Onset)
LIVE_STATES: tuple[State, ...] = ("running", "stalled")
STATES: tuple[State, ...] = get_args(State)
HOOK_FAULTS: tuple[HookFault, ...] = get_args(HookFault)

Component = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "held",
    "step",
    "gradients_or_step",
    "pending",
    "rounding",
]
COMPONENTS: tuple[Component, ...] = get_args(Component)
PASSING: frozenset[str] = frozenset(
    {"gradients", "step", "gradients_or_step", "pending", "rounding"}
)
"""Components that change within each step."""
ASLEEP = "asleep"
"""The component of what an engine has given back to the driver while PyTorch counts it."""
MAX_TRACKED = 25
MAX_PID = 1 << 22  # PID_MAX_LIMIT of Linux, include/linux/threads.h
MAX_COMPONENTS = len(COMPONENTS) + len({ASLEEP}) + MAX_TRACKED

# Upper bounds of the free-block histogram, in bytes: from one page to the largest block on a GPU.
FREE_BLOCK_BOUNDS: tuple[int, ...] = (1 << 12, 1 << 16, *(1 << power for power in range(20, 36)))

# Upper bounds of the step-duration histogram, in seconds.
STEP_DURATION_BOUNDS: tuple[float, ...] = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(frozen=True, slots=True)
class ByPool:
    """A count or a number of bytes for the small (blocks ≤ 1 MiB) and the large pool.

    `undivided` replaces both where the allocator has no such pools (backend:cudaMallocAsync).
    """

    small: int | None
    large: int | None
    undivided: int | None = None

    @property
    def total(self) -> int:
        """Sum over both pools."""
        return (self.small or 0) + (self.large or 0) + (self.undivided or 0)

    def by_label(self) -> dict[str, int]:
        """Return the known values by the label `pool`; the label of an undivided value is empty."""
        named = {"small": self.small, "large": self.large, "": self.undivided}
        return {pool: value for pool, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Allocator:
    """Current and peak bytes of one device, from `torch.cuda.memory_stats_as_nested_dict()`."""

    allocated_bytes: ByPool
    active_bytes: ByPool
    reserved_bytes: ByPool
    requested_bytes: ByPool | None
    inactive_split_bytes: ByPool | None
    allocated_peak_bytes: int | None
    active_peak_bytes: int | None
    reserved_peak_bytes: int | None


def _counted(statistic: str) -> Any:
    """Declare a field that counts one of PyTorch's statistics.

    Its metric is `torchmem_FIELD_total`.
    """
    return field(default=None, metadata={"statistic": statistic})


@dataclass(frozen=True, slots=True)
class Counters:
    """Events of one device since the process started.

    They never decrease, even if the user resets PyTorch's own counters. `ooms` is None where the
    allocator does not report OOMs. `neighbor_requests` counts how often the process asked others
    on the GPU for memory, and `wait_seconds` the time that it waited; both are None without the
    tier `neighbors` of the setting `release`.
    """

    alloc_retries: int | None = _counted("num_alloc_retries")
    oom_rejections: int | None = _counted("num_oom_rejections")
    device_allocs: int | None = _counted("num_device_alloc")
    device_frees: int | None = _counted("num_device_free")
    stream_syncs: int | None = _counted("num_sync_all_streams")
    ooms: dict[OomCause, int] | None = None
    neighbor_requests: int | None = None
    wait_seconds: float | None = None


COUNTED: dict[str, str] = {
    each.metadata["statistic"]: each.name
    for each in fields(Counters)
    if "statistic" in each.metadata
}
"""Fields of `Counters` by PyTorch's name (torch/csrc/cuda/Module.cpp, `THCPModule_memoryStats`)."""


@dataclass(frozen=True, slots=True)
class Releases:
    """What one tier of releases did on one device since the process started.

    The tier `request` is the command `torchmem release`; the others are of the setting `release`.

    `released_bytes` were returned to the driver. `seconds` grows while a release lasts. `given_up`:
    the tier no longer acts, because its releases did not pay.
    """

    times: int
    released_bytes: int
    seconds: float
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks by state, from the snapshot's `state` field."""

    active_allocated: ByPool
    active_pending_free: ByPool
    inactive: ByPool


@dataclass(frozen=True, slots=True)
class Layout:
    """What one memory snapshot shows of one device, in bytes; `timestamp` in Unix seconds.

    All fields describe the default pools, except the `private_` ones (CUDA graphs and MemPools) and
    `in_use_bytes`: what was not free, in all pools. `largest_allocated_block_bytes` is 0 where no
    tensor is allocated. Once the allocator has returned memory to the driver, `releasable_bytes`
    and `stranded_bytes` are what can be left at most, and what depends on single blocks is None
    until the next snapshot.
    """

    timestamp: float
    segments: ByPool | None
    blocks: BlockCounts | None
    releasable_bytes: int
    stranded_bytes: int
    largest_free_block_bytes: int | None
    free_block_counts: tuple[int, ...] | None
    private_used_bytes: int
    private_free_bytes: int
    headroom_bytes: int | None
    headroom_flush_bytes: int | None
    pending_free_bytes: int | None = None
    largest_allocated_block_bytes: int | None = None
    in_use_bytes: int | None = None

    @property
    def free_bytes(self) -> int:
        """Cached free bytes: releasable plus stranded."""
        return self.releasable_bytes + self.stranded_bytes

    @property
    def fragmentation_ratio(self) -> float | None:
        """1 − largest free block / free bytes; None when nothing is free or it is unknown."""
        if self.free_bytes == 0 or self.largest_free_block_bytes is None:
            return None
        return 1 - self.largest_free_block_bytes / self.free_bytes


@dataclass(frozen=True, slots=True)
class OomRecord:
    """The latest OutOfMemoryError of one device.

    `timestamp` is in Unix seconds; `requested_bytes` is the request rounded up to a segment, or
    None for a library that did not report it; `cause` is the change that would have freed enough
    memory to matter, or capacity if none would; `detail` is the kind of fragmentation where that is
    the cause, and `driver` for a limit of the driver's own, which had the memory. `onset` is what
    had changed; None if unknown. `line` is the innermost line of the user's own code, as file:line
    without directories, and `function` is its function. `at_wake_up`: an inference engine could not
    wake up, and `requested_bytes` is what it was still to take from the driver. `remedy` is the
    first advice of the report; None in the report itself.
    """

    timestamp: float
    requested_bytes: int | None
    cause: OomCause
    detail: OomDetail | None = None
    line: str | None = None
    function: str | None = None
    onset: Onset | None = None
    at_wake_up: bool = False
    remedy: RemedyKind | None = None


@dataclass(frozen=True, slots=True)
class FirstRead:
    """What the first read of a device found, in bytes; `timestamp` in Unix seconds.

    `driver_free_bytes` is from cudaMemGetInfo.
    """

    timestamp: float
    reserved_bytes: int
    driver_free_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device of the process: torch's index, the UUID as NVML writes it, and its memory.

    `phase_peaks` holds the highest allocated bytes in each phase that the script named.
    `stats_timestamp` is the time at which `allocator`, `counters`, `driver_free_bytes` and
    `limit_bytes` were read, in Unix seconds; `driver_free_bytes` is from cudaMemGetInfo, and
    `limit_bytes` is what a memory fraction lets the process reserve, None without one.
    `shares_host_memory`: the device has no memory of its own, but uses the host's; its
    `driver_free_bytes` are what the host has available. If they are
    newer than `layout`, its headroom is from their time. `planned_peak_bytes` is the active peak to
    expect of the largest batch that the script plans. `components` holds what the bytes in
    `allocator` consist of: bytes by `Component`, or by the name of a part that the script tracks.
    They add up to the active bytes, or are empty. `releases` has an entry for each tier of the
    setting `release` that is on. `component_peaks` is the same for the peak of the active bytes, as
    known from a step that ended at `component_peak_timestamp`, in Unix seconds. `first_read` is
    what the first read found, usually within a second of the creation of the CUDA context.
    `run_history` spans the whole run, and `growth` is what grows in it now, if anything does.
    `engine` is the inference engine in this process, None without one. `managed_bytes` is the
    managed memory of the process (cudaMallocManaged) for this device; None without any.
    `communicators` holds NCCL's memory, outside the allocator, by process group; `rmm` that of
    RAPIDS' memory manager. `visible_devices` is how many devices the process sees.
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
    stats_timestamp: float | None = None
    driver_free_bytes: int | None = None
    limit_bytes: int | None = None
    planned_peak_bytes: int | None = None
    components: dict[str, int] = field(default_factory=dict)
    component_peaks: dict[str, int] = field(default_factory=dict)
    component_peak_timestamp: float | None = None
    first_read: FirstRead | None = None
    releases: dict[ReleaseTier, Releases] = field(default_factory=dict)
    run_history: RunHistory | None = None
    growth: Growth | None = None
    engine: Engine | None = None
    communicators: dict[str, Communicator] = field(default_factory=dict)
    rmm: RmmMemory | None = None
    shares_host_memory: bool = False
    managed_bytes: int | None = None
    visible_devices: int | None = None


def distinct_devices(devices: Iterable[DeviceSample]) -> tuple[DeviceSample, ...]:
    """Return the first device of each UUID, and the first without a UUID.

    Others would have the same labels.
    """
    first: dict[str | None, DeviceSample] = {}
    for device in devices:
        first.setdefault(device.uuid, device)
    return tuple(first.values())


@dataclass(frozen=True, slots=True)
class Steps:
    """Optimizer steps: their number, the time between them, and the samples that were reported.

    `count` is unknown while it is 0: the SDK sees the optimizers of torch.optim and what the script
    reports, and other programs step without either.
    `duration_counts` has one entry for each of STEP_DURATION_BOUNDS and one for longer steps.
    `last_timestamp` is the end of the latest step. `progress_timestamp` is the latest time at which
    a pass of the loop began or ended, such as an evaluation batch, or between steps a read found
    new allocations. Both are in Unix seconds.
    `read_count` is how many steps had ended at the latest read at a step's end. The components
    `step` and `gradients_or_step` were allocated since then.
    """

    count: int = 0
    duration_counts: tuple[int, ...] = (0,) * (len(STEP_DURATION_BOUNDS) + 1)
    duration_sum_seconds: float = 0.0
    samples: int | None = None
    last_timestamp: float | None = None
    progress_timestamp: float | None = None
    read_count: int | None = None

    @property
    def unread(self) -> int | None:
        """Steps that have ended since the latest read at a step's end; None if that is unknown."""
        return None if self.read_count is None else max(0, self.count - self.read_count)

    @property
    def mean_seconds(self) -> float | None:
        """The mean time between two steps; None before the second one."""
        return self.duration_sum_seconds / (self.count - 1) if self.count > 1 else None


@dataclass(frozen=True, slots=True)
class SelfCost:
    """What the SDK itself cost: duration of the latest reads, total CPU time, errors by stage.

    `errors` has only stages with an error.
    `oom_duration_seconds` is how long the latest OutOfMemoryError was delayed to write its report.
    """

    stats_duration_seconds: float | None = None
    snapshot_duration_seconds: float | None = None
    cpu_seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    oom_duration_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of the process, in bytes.

    `rss_bytes` is the resident set. `limit_bytes` is the memory limit that leaves the least: that
    of a control group, or the machine's memory. `available_bytes` is what is left below it.
    """

    rss_bytes: int
    limit_bytes: int | None = None
    available_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """Bytes of PyTorch's pinned-memory allocator, from `torch.cuda.host_memory_stats()`.

    `timestamp` is when they were read, in Unix seconds.
    """

    used_bytes: int
    cached_bytes: int
    timestamp: float | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """The process that published the sample.

    `pid` is valid in the pid namespace `pid_namespace` (inode of /proc/self/ns/pid). `start_ticks`
    is field 22 of /proc/PID/stat (clock ticks since boot), which together with the pid identifies
    the process even after the pid is reused; `start_timestamp` is the same in Unix seconds.
    `launch` is the same for all ranks of one launch (`torchmem.sample.launch`); None if unknown.
    `labels` holds scheduler IDs such as slurm_job_id; `versions` holds the versions of torch, cuda
    and python, and the allocator backend.
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
    start_timestamp: float | None = None
    launch: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything that one process publishes at `timestamp` (Unix seconds).

    Attributes:
        settings_ignored: for each allocator setting in the environment, whether PyTorch ignored
            it; settings for which this cannot be determined are left out.
        oom_pending: whether no step has finished since the latest OutOfMemoryError.
        ended: how the process ended, as it reported itself.
        metrics_url: URL of the in-process endpoint, if the process serves one.
        stall_after_seconds: time without a step or other progress after which the process counts as
            stalled; None while it waits for work.
        memory_map: whether the process publishes its memory map when it is asked to.
        hooks_dropped: pressure hooks that are no longer called, by reason; empty without hooks.
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
    host: HostMemory | None = None
    pinned: PinnedMemory | None = None
    memory_map: bool | None = None
    hooks_dropped: dict[HookFault, int] = field(default_factory=dict)
    schema: int = SCHEMA_VERSION


def live_state(sample: Sample, now: float) -> Literal["running", "stalled"]:
    """Return `stalled` if a process that made progress has made none for `stall_after_seconds`.

    `now` is in Unix seconds. The time of the latest step or other progress decides, not that of the
    sample: a process that hangs while it holds the GIL publishes nothing more.
    """
    steps, patience = sample.steps, sample.stall_after_seconds
    known = [time for time in (steps.last_timestamp, steps.progress_timestamp) if time is not None]
    stalled = bool(known) and patience is not None and now - max(known) > patience
    return "stalled" if stalled else "running"


def possible(sample: Sample) -> tuple[Sample | None, tuple[Fault, ...]]:
    """Return the sample without values that cannot be true, and what was left out.

    The SDK publishes nothing else, and readers use nothing else. The sample is None if its own
    time, process or steps are impossible.
    """
    return without_impossible(sample, _contradictions)


def is_consistent(sample: Sample) -> bool:
    """Return whether `possible` finds no contradiction; numbers are not checked."""
    parts = ((d, d.layout, d.run_history, d.growth) for d in sample.devices)
    found = (part for device in parts for part in device if part)
    return all(_contradictions(part) == {} for part in (sample, sample.process, *found))


def _contradictions(value: object) -> Mapping[str, Any] | None:
    if isinstance(value, (Sample, Layout, RunHistory, Growth)):
        return {} if _is_whole(value) else None
    if isinstance(value, Engine):
        return too_long(value)
    if isinstance(value, Process):
        return {} if is_launch(value.launch) else {"launch": None}
    if isinstance(value, DeviceSample):
        return _contradictions_of_device(value)
    return {}


def _contradictions_of_device(device: DeviceSample) -> Mapping[str, Any]:
    """Return too many components, and free memory that the device does not have."""
    wrong: dict[str, Any] = {
        name: {} for name, most in _MOST.items() if len(getattr(device, name)) > most
    }
    total, free, first = device.total_bytes, device.driver_free_bytes, device.first_read
    if total is not None and free is not None and free > total:
        wrong["driver_free_bytes"] = None
    if total is not None and first is not None and first.driver_free_bytes > total:
        wrong["first_read"] = None
    return wrong


_MOST = {
    "components": MAX_COMPONENTS,
    "component_peaks": MAX_COMPONENTS,
    "communicators": MAX_GROUPS,
}
"""The most entries that the SDK publishes."""


def _is_whole(value: Sample | Layout | RunHistory | Growth) -> bool:
    """Return whether the parts of a value fit together; otherwise all of it is dropped."""
    if isinstance(value, Growth):
        return value.bytes_per_step >= 1
    if isinstance(value, Sample):
        has_all = len(value.steps.duration_counts) == len(STEP_DURATION_BOUNDS) + 1
        return has_all and 0 < value.process.pid <= MAX_PID
    if isinstance(value, RunHistory):
        return value.is_consistent
    counts, largest = value.free_block_counts, value.largest_free_block_bytes
    has_all = counts is None or len(counts) == len(FREE_BLOCK_BOUNDS) + 1
    return has_all and (largest or 0) <= value.free_bytes


def _fields(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields by name; `asdict` also copies their contents, at 4x the cost."""
    return {name: getattr(value, name) for name in value.__slots__}


ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_fields)
"""Encodes dataclasses with slots; raises ValueError for NaN and infinity."""


def encode(sample: Sample) -> bytes:
    """Return the sample as one line of UTF-8 JSON; raise ValueError for NaN and infinity."""
    return ENCODER.encode(sample).encode() + b"\n"


def decode(data: bytes) -> Sample:
    """Return the sample in a file that any user may have written.

    Values that cannot be true are left out. Raises ValueError or RecursionError for anything else,
    also for another schema.
    """
    raw = sanitize_json(json.loads(data), keeps_numbers=True)
    sample, _ = possible(convert(raw, Sample))
    if sample is None:
        raise ValueError("the time, the process or the steps are impossible")
    if sample.schema != SCHEMA_VERSION:
        raise ValueError("the sample has another schema")
    return sample


def read_sample(path: Path, owner: int | None = None) -> Sample | None:
    """Return the sample in a file of the user `owner`, or of any user; None without a valid one."""
    try:
        return decode(read_untrusted(path, MAX_SAMPLE_BYTES, owner)[0])
    except (OSError, UntrustedFileError, ValueError, RecursionError):
        return None
