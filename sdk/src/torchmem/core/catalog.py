"""Every metric of torchmem, declared once: name, kind, help, labels, and the group it is documented under.

The families, the README's table, the rules, the dashboards and the tests all read or check this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram", "gaugehistogram", "info"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its name as Prometheus shows it, kind, help sentence and label names in order."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    group: str


CATALOG: dict[str, MetricSpec] = {}

RANK = ("rank", "pid", "run")
DEVICE = ("gpu", "uuid", *RANK)
GPU = ("gpu", "uuid")


def _declare(group: str, kind: Kind, name: str, help_text: str, labels: tuple[str, ...] = ()) -> MetricSpec:
    if name in CATALOG:
        raise ValueError(f"metric {name} is declared twice")
    CATALOG[name] = spec = MetricSpec(name, kind, help_text, labels, group)
    return spec


_G = "Allocator, per rank and device"
ALLOCATED = _declare(
    _G, "gauge", "torchmem_allocated_bytes", "Bytes of blocks handed out to tensors.", (*DEVICE, "pool")
)
ACTIVE = _declare(
    _G,
    "gauge",
    "torchmem_active_bytes",
    "Allocated bytes plus freed blocks that wait for another stream.",
    (*DEVICE, "pool"),
)
RESERVED = _declare(
    _G, "gauge", "torchmem_reserved_bytes", "Bytes the allocator holds from the driver.", (*DEVICE, "pool")
)
REQUESTED = _declare(
    _G, "gauge", "torchmem_requested_bytes", "Bytes callers asked for, before rounding.", (*DEVICE, "pool")
)
INACTIVE_SPLIT = _declare(
    _G,
    "gauge",
    "torchmem_inactive_split_bytes",
    "Free bytes of split segments, which cannot be returned; absent with expandable segments.",
    (*DEVICE, "pool"),
)
ALLOCATED_PEAK = _declare(
    _G, "gauge", "torchmem_allocated_peak_bytes", "Highest allocated bytes since the process started.", DEVICE
)
ACTIVE_PEAK = _declare(
    _G, "gauge", "torchmem_active_peak_bytes", "Highest active bytes since the process started.", DEVICE
)
RESERVED_PEAK = _declare(
    _G, "gauge", "torchmem_reserved_peak_bytes", "Highest reserved bytes since the process started.", DEVICE
)
DEVICE_TOTAL = _declare(
    _G, "gauge", "torchmem_device_total_bytes", "Memory of the device as CUDA reports it to the process.", DEVICE
)

PHASE_PEAK = _declare(
    _G,
    "gauge",
    "torchmem_phase_allocated_peak_bytes",
    "Highest allocated bytes within a phase that the script named, as far as it was seen.",
    (*DEVICE, "phase"),
)

_G = "Fragmentation, from snapshots at random moments"
SEGMENTS = _declare(
    _G, "gauge", "torchmem_segments", "Segments of the default pools, by the pool they serve.", (*DEVICE, "pool")
)
BLOCKS = _declare(
    _G, "gauge", "torchmem_blocks", "Blocks of the default pools, by pool and state.", (*DEVICE, "pool", "state")
)
FREE = _declare(
    _G,
    "gauge",
    "torchmem_free_bytes",
    "Cached free bytes: releasable (whole free segments) or stranded (pinned beside live blocks).",
    (*DEVICE, "state"),
)
LARGEST_FREE_BLOCK = _declare(
    _G, "gauge", "torchmem_largest_free_block_bytes", "Largest free block in the default pools.", DEVICE
)
FRAGMENTATION = _declare(
    _G,
    "gauge",
    "torchmem_fragmentation_ratio",
    "1 - largest free block / free bytes, default pools; absent when nothing is free.",
    DEVICE,
)
FREE_BLOCK_SIZE = _declare(
    _G, "gaugehistogram", "torchmem_free_block_size_bytes", "Free blocks of the default pools by size.", DEVICE
)
HEADROOM = _declare(
    _G,
    "gauge",
    "torchmem_headroom_bytes",
    "Largest single allocation that would succeed now, without or with the allocator's retry flush.",
    (*DEVICE, "flush"),
)
PRIVATE_POOL = _declare(
    _G,
    "gauge",
    "torchmem_private_pool_bytes",
    "Memory of CUDA graphs and MemPools, used or free.",
    (*DEVICE, "state"),
)
SNAPSHOT_TIMESTAMP = _declare(
    _G,
    "gauge",
    "torchmem_snapshot_timestamp_seconds",
    "Unix time of the snapshot that the values of this group come from.",
    DEVICE,
)

_G = "Pressure and failures"
ALLOC_RETRIES = _declare(
    _G,
    "counter",
    "torchmem_alloc_retries_total",
    "Times the allocator freed its whole cache to retry an allocation.",
    DEVICE,
)
OOMS = _declare(
    _G,
    "counter",
    "torchmem_ooms_total",
    "OutOfMemoryErrors raised, caught or not, by cause: capacity, fragmentation, limit, external.",
    (*DEVICE, "cause"),
)
OOM_REJECTIONS = _declare(
    _G, "counter", "torchmem_oom_rejections_total", "Allocations refused before the driver was asked.", DEVICE
)
DEVICE_ALLOCS = _declare(
    _G,
    "counter",
    "torchmem_device_allocs_total",
    "Segments taken from the driver: cudaMalloc and map operations.",
    DEVICE,
)
DEVICE_FREES = _declare(
    _G,
    "counter",
    "torchmem_device_frees_total",
    "Segments given back to the driver: cudaFree and unmap operations.",
    DEVICE,
)
STREAM_SYNCS = _declare(
    _G, "counter", "torchmem_stream_syncs_total", "Times the allocator waited for all streams.", DEVICE
)
RELEASES = _declare(
    _G, "counter", "torchmem_releases_total", "Times the setting `release` returned the cache to the driver.", DEVICE
)
RELEASED = _declare(
    _G, "counter", "torchmem_released_bytes_total", "Bytes that the setting `release` returned to the driver.", DEVICE
)
LAST_OOM_TIMESTAMP = _declare(
    _G, "gauge", "torchmem_last_oom_timestamp_seconds", "Unix time of the newest OutOfMemoryError.", DEVICE
)
LAST_OOM_REQUESTED = _declare(
    _G,
    "gauge",
    "torchmem_last_oom_requested_bytes",
    "Bytes that the newest OutOfMemoryError asked the driver for.",
    DEVICE,
)

_G = "Process and steps"
PROCESS_INFO = _declare(
    _G,
    "info",
    "torchmem_process_info",
    "Facts about the process: ranks, host name, script, versions, scheduler ids.",
    RANK,
)
ALLOCATOR_INFO = _declare(_G, "info", "torchmem_allocator_info", "The allocator settings in effect.", RANK)
SETTING_IGNORED = _declare(
    _G,
    "gauge",
    "torchmem_allocator_setting_ignored",
    "1 if the allocator did not take over a setting of PYTORCH_CUDA_ALLOC_CONF or its like, 0 if it did.",
    (*RANK, "setting"),
)
PROCESS_STATE = _declare(
    _G,
    "gauge",
    "torchmem_process_state",
    "1 for the state the process is in: running, stalled, exited, oom, killed.",
    (*RANK, "state"),
)
STEPS = _declare(_G, "counter", "torchmem_steps_total", "Optimizer steps seen.", RANK)
STEP_DURATION = _declare(
    _G, "histogram", "torchmem_step_duration_seconds", "Time between the ends of two optimizer steps.", RANK
)
SAMPLES = _declare(_G, "counter", "torchmem_samples_total", "Training samples, as the script reported them.", RANK)

_G = "The SDK watching itself"
SAMPLE_TIMESTAMP = _declare(
    _G, "gauge", "torchmem_sample_timestamp_seconds", "Unix time at which the process wrote its state.", RANK
)
SAMPLE_DURATION = _declare(
    _G,
    "gauge",
    "torchmem_sample_duration_seconds",
    "Duration of the newest read, by kind: stats, snapshot, or oom (evidence written before the error is raised).",
    (*RANK, "kind"),
)
SDK_CPU = _declare(_G, "counter", "torchmem_sdk_cpu_seconds_total", "CPU time the SDK spent.", RANK)
SDK_ERRORS = _declare(
    _G, "counter", "torchmem_sdk_errors_total", "Errors the SDK swallowed, by stage.", (*RANK, "stage")
)

_G = "The join of allocator and NVML"
OUTSIDE_ALLOCATOR = _declare(
    _G,
    "gauge",
    "torchmem_outside_allocator_bytes",
    "NVML's bytes of the process minus its reserved bytes: context, NCCL, cuBLAS, other libraries.",
    DEVICE,
)

_G = "NVML: what nvidia-smi shows"
NVML_UP = _declare(_G, "gauge", "nvml_up", "1 if NVML answers, else 0 with the reason.", ("reason",))
NVML_GPU_UP = _declare(_G, "gauge", "nvml_gpu_up", "1 if this GPU answers, 0 if it was lost.", GPU)
NVML_GPU_ERROR = _declare(
    _G, "gauge", "nvml_gpu_error_code", "NVML return code of the newest failed call on this GPU.", GPU
)
NVML_GPU_INFO = _declare(_G, "info", "nvml_gpu_info", "Name, PCI bus id and driver of the GPU.", GPU)
NVML_MEMORY_TOTAL = _declare(_G, "gauge", "nvml_memory_total_bytes", "Memory of the GPU.", GPU)
NVML_MEMORY_USED = _declare(_G, "gauge", "nvml_memory_used_bytes", "Memory used by all processes.", GPU)
NVML_MEMORY_FREE = _declare(_G, "gauge", "nvml_memory_free_bytes", "Memory the driver can still give.", GPU)
NVML_MEMORY_RESERVED = _declare(
    _G, "gauge", "nvml_memory_reserved_bytes", "Memory the driver keeps; used + free + reserved = total.", GPU
)
NVML_PROCESS_MEMORY = _declare(
    _G, "gauge", "nvml_process_memory_bytes", "Memory of one process on the GPU.", (*GPU, "pid")
)
NVML_PROCESS_INFO = _declare(
    _G, "info", "nvml_process_info", "Name and user of a process on the GPU, where visible.", (*GPU, "pid")
)
NVML_UTILIZATION = _declare(
    _G,
    "gauge",
    "nvml_utilization_ratio",
    "Share of time in which a kernel ran (gpu) or memory was read or written (memory).",
    (*GPU, "engine"),
)
NVML_POWER = _declare(_G, "gauge", "nvml_power_watts", "Power draw.", GPU)
NVML_TEMPERATURE = _declare(_G, "gauge", "nvml_temperature_celsius", "Temperature by sensor.", (*GPU, "sensor"))

_G = "The exporter watching itself"
BUILD_INFO = _declare(_G, "info", "torchmem_exporter_build_info", "Version of torchmem and Python.")
COLLECTOR_SUCCESS = _declare(
    _G, "gauge", "torchmem_exporter_collector_success", "1 if the collector succeeded in this scrape.", ("collector",)
)
COLLECTOR_DURATION = _declare(
    _G, "gauge", "torchmem_exporter_collector_duration_seconds", "Duration of the collector.", ("collector",)
)
REJECTED_SAMPLES = _declare(
    _G,
    "counter",
    "torchmem_exporter_rejected_samples_total",
    "Files of the run directory that were refused, by reason.",
    ("reason",),
)
