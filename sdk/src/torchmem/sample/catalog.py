"""Every metric of torchmem, declared once: name, kind, help, labels, and the group it is documented under.

The families, docs/metrics.md, the rules, the dashboards and the tests all read or check this file.
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


def _declare(
    group: str, kind: Kind, name: str, help_text: str, labels: tuple[str, ...] = ()
) -> MetricSpec:
    if name in CATALOG:
        raise ValueError(f"metric {name} is declared twice")
    CATALOG[name] = spec = MetricSpec(name, kind, help_text, labels, group)
    return spec


_G = "Allocator, per rank and device"
ALLOCATED = _declare(
    _G,
    "gauge",
    "torchmem_allocated_bytes",
    "Bytes of blocks handed out to tensors.",
    (*DEVICE, "pool"),
)
ACTIVE = _declare(
    _G,
    "gauge",
    "torchmem_active_bytes",
    "Allocated bytes plus freed blocks that wait for another stream.",
    (*DEVICE, "pool"),
)
RESERVED = _declare(
    _G,
    "gauge",
    "torchmem_reserved_bytes",
    "Bytes the allocator holds from the driver.",
    (*DEVICE, "pool"),
)
REQUESTED = _declare(
    _G,
    "gauge",
    "torchmem_requested_bytes",
    "Bytes callers asked for, before rounding.",
    (*DEVICE, "pool"),
)
INACTIVE_SPLIT = _declare(
    _G,
    "gauge",
    "torchmem_inactive_split_bytes",
    "Free bytes of split segments, which cannot be returned; absent with expandable segments.",
    (*DEVICE, "pool"),
)
ALLOCATED_PEAK = _declare(
    _G,
    "gauge",
    "torchmem_allocated_peak_bytes",
    "Highest allocated bytes since the process started.",
    DEVICE,
)
ACTIVE_PEAK = _declare(
    _G,
    "gauge",
    "torchmem_active_peak_bytes",
    "Highest active bytes since the process started.",
    DEVICE,
)
RESERVED_PEAK = _declare(
    _G,
    "gauge",
    "torchmem_reserved_peak_bytes",
    "Highest reserved bytes since the process started.",
    DEVICE,
)
DEVICE_TOTAL = _declare(
    _G,
    "gauge",
    "torchmem_device_total_bytes",
    "Memory of the device as CUDA reports it to the process.",
    DEVICE,
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
    _G,
    "gauge",
    "torchmem_segments",
    "Segments of the default pools, by the pool they serve.",
    (*DEVICE, "pool"),
)
BLOCKS = _declare(
    _G,
    "gauge",
    "torchmem_blocks",
    "Blocks of the default pools, by pool and state.",
    (*DEVICE, "pool", "state"),
)
FREE = _declare(
    _G,
    "gauge",
    "torchmem_free_bytes",
    "Cached free bytes: releasable (whole free segments) or stranded (pinned beside live blocks).",
    (*DEVICE, "state"),
)
LARGEST_FREE_BLOCK = _declare(
    _G,
    "gauge",
    "torchmem_largest_free_block_bytes",
    "Largest free block in the default pools.",
    DEVICE,
)
FRAGMENTATION = _declare(
    _G,
    "gauge",
    "torchmem_fragmentation_ratio",
    "1 - largest free block / free bytes, default pools; absent when nothing is free.",
    DEVICE,
)
FREE_BLOCK_SIZE = _declare(
    _G,
    "gaugehistogram",
    "torchmem_free_block_size_bytes",
    "Free blocks of the default pools by size.",
    DEVICE,
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
    _G,
    "counter",
    "torchmem_oom_rejections_total",
    "Allocations refused before the driver was asked.",
    DEVICE,
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
    _G,
    "counter",
    "torchmem_stream_syncs_total",
    "Times the allocator waited for all streams.",
    DEVICE,
)
RELEASES = _declare(
    _G,
    "counter",
    "torchmem_releases_total",
    "Times the setting `release` returned the cache to the driver.",
    DEVICE,
)
RELEASED = _declare(
    _G,
    "counter",
    "torchmem_released_bytes_total",
    "Bytes that the setting `release` returned to the driver.",
    DEVICE,
)
LAST_OOM_TIMESTAMP = _declare(
    _G,
    "gauge",
    "torchmem_last_oom_timestamp_seconds",
    "Unix time of the newest OutOfMemoryError.",
    DEVICE,
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
ALLOCATOR_INFO = _declare(
    _G, "info", "torchmem_allocator_info", "The allocator settings in effect.", RANK
)
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
    _G,
    "histogram",
    "torchmem_step_duration_seconds",
    "Time between the ends of two optimizer steps.",
    RANK,
)
SAMPLES = _declare(
    _G, "counter", "torchmem_samples_total", "Training samples, as the script reported them.", RANK
)

_G = "The SDK watching itself"
SAMPLE_TIMESTAMP = _declare(
    _G,
    "gauge",
    "torchmem_sample_timestamp_seconds",
    "Unix time at which the process wrote its state.",
    RANK,
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
    _G,
    "counter",
    "torchmem_sdk_errors_total",
    "Errors the SDK swallowed, by stage.",
    (*RANK, "stage"),
)

_G = "The join of allocator and NVML"
OUTSIDE_ALLOCATOR = _declare(
    _G,
    "gauge",
    "torchmem_outside_allocator_bytes",
    "NVML's bytes of the process minus its reserved bytes: context, NCCL, cuBLAS, other libraries.",
    DEVICE,
)

_G = "NVML: devices and memory"
NVML_UP = _declare(
    _G, "gauge", "nvml_up", "1 if NVML answers, else 0 with the reason.", ("reason",)
)
NVML_DRIVER_INFO = _declare(
    _G, "info", "nvml_driver_info", "Versions of the driver, of NVML, and of the newest CUDA."
)
NVML_GPU_UP = _declare(
    _G, "gauge", "nvml_gpu_up", "1 if this GPU answers, 0 if it is lost or a call on it hangs.", GPU
)
NVML_GPU_ERROR = _declare(
    _G,
    "gauge",
    "nvml_gpu_error_code",
    "NVML return code of the newest failed call on this GPU.",
    GPU,
)
NVML_GPU_INFO = _declare(
    _G,
    "info",
    "nvml_gpu_info",
    "Name, PCI bus id, driver, VBIOS, compute mode and persistence mode of the GPU.",
    GPU,
)
NVML_MEMORY_TOTAL = _declare(_G, "gauge", "nvml_memory_total_bytes", "Memory of the GPU.", GPU)
NVML_MEMORY_USED = _declare(
    _G, "gauge", "nvml_memory_used_bytes", "Memory used by all processes.", GPU
)
NVML_MEMORY_FREE = _declare(
    _G, "gauge", "nvml_memory_free_bytes", "Memory the driver can still give.", GPU
)
NVML_MEMORY_RESERVED = _declare(
    _G,
    "gauge",
    "nvml_memory_reserved_bytes",
    "Memory the driver keeps; used + free + reserved = total.",
    GPU,
)
NVML_UNIFIED_MEMORY = _declare(
    _G,
    "gauge",
    "nvml_unified_memory",
    "1 if the GPU has no memory of its own but shares the CPU's, so that NVML gives no memory of the GPU; else 0.",
    GPU,
)
NVML_BAR1_TOTAL = _declare(
    _G,
    "gauge",
    "nvml_bar1_total_bytes",
    "Size of the window through which others reach the GPU's memory.",
    GPU,
)
NVML_BAR1_USED = _declare(_G, "gauge", "nvml_bar1_used_bytes", "Bytes of that window in use.", GPU)
NVML_MIG_ENABLED = _declare(
    _G, "gauge", "nvml_mig_enabled", "1 if the GPU is in MIG mode, else 0.", GPU
)
NVML_MIG_INFO = _declare(
    _G,
    "info",
    "nvml_mig_info",
    "UUID and profile of a MIG device, that is of a compute instance.",
    (*GPU, "gpu_instance", "compute_instance"),
)
_MIG = (*GPU, "gpu_instance")
NVML_MIG_MEMORY_TOTAL = _declare(
    _G, "gauge", "nvml_mig_memory_total_bytes", "Memory of the GPU instance.", _MIG
)
NVML_MIG_MEMORY_USED = _declare(
    _G, "gauge", "nvml_mig_memory_used_bytes", "Memory used in the GPU instance.", _MIG
)
NVML_MIG_MEMORY_FREE = _declare(
    _G, "gauge", "nvml_mig_memory_free_bytes", "Memory that the GPU instance can still give.", _MIG
)
NVML_MIG_MEMORY_RESERVED = _declare(
    _G,
    "gauge",
    "nvml_mig_memory_reserved_bytes",
    "Memory of the GPU instance that the driver keeps.",
    _MIG,
)

_G = "NVML: processes"
NVML_PROCESSES = _declare(_G, "gauge", "nvml_processes", "Processes on the GPU.", GPU)
NVML_PROCESS_MEMORY = _declare(
    _G,
    "gauge",
    "nvml_process_memory_bytes",
    'Memory of one process on the GPU; pid="other" is the sum of those beyond the largest ones.',
    (*GPU, "pid"),
)
NVML_PROCESS_UTILIZATION = _declare(
    _G,
    "gauge",
    "nvml_process_utilization_ratio",
    "Share of time in which kernels of the process ran (sm) or used memory (memory); absent while it is idle.",
    (*GPU, "pid", "engine"),
)
NVML_PROCESS_INFO = _declare(
    _G,
    "info",
    "nvml_process_info",
    "Name, user, container, pod, Slurm job, rank and run of a process on the GPU, where visible.",
    (*GPU, "pid"),
)
NVML_UNATTRIBUTED_MEMORY = _declare(
    _G,
    "gauge",
    "nvml_unattributed_memory_bytes",
    "Used memory minus what all processes hold; absent unless NVML tells the bytes of every process.",
    GPU,
)

_G = "NVML: utilization, power and clocks"
NVML_UTILIZATION = _declare(
    _G,
    "gauge",
    "nvml_utilization_ratio",
    "Share of time in which a kernel ran (gpu), memory was read or written (memory), or a media engine was busy "
    "(encoder, decoder, jpeg, ofa).",
    (*GPU, "engine"),
)
NVML_SM_ACTIVE = _declare(
    _G,
    "gauge",
    "nvml_sm_active_ratio",
    "Mean share of SMs that were busy since the previous scrape.",
    GPU,
)
NVML_SM_OCCUPANCY = _declare(
    _G,
    "gauge",
    "nvml_sm_occupancy_ratio",
    "Mean share of the possible warps that were active since the previous scrape.",
    GPU,
)
NVML_TENSOR_ACTIVE = _declare(
    _G,
    "gauge",
    "nvml_tensor_active_ratio",
    "Share of time in which tensor cores worked since the previous scrape.",
    GPU,
)
NVML_DRAM_ACTIVE = _declare(
    _G,
    "gauge",
    "nvml_dram_active_ratio",
    "Share of the memory bandwidth that was used since the previous scrape.",
    GPU,
)
NVML_POWER = _declare(_G, "gauge", "nvml_power_watts", "Power draw.", GPU)
NVML_POWER_LIMIT = _declare(
    _G, "gauge", "nvml_power_limit_watts", "Power limit that is enforced.", GPU
)
NVML_POWER_LIMIT_MAX = _declare(
    _G, "gauge", "nvml_power_limit_max_watts", "Highest power limit that can be set.", GPU
)
NVML_ENERGY = _declare(
    _G, "counter", "nvml_energy_joules_total", "Energy consumed since the driver was loaded.", GPU
)
NVML_TEMPERATURE = _declare(
    _G, "gauge", "nvml_temperature_celsius", "Temperature by sensor.", (*GPU, "sensor")
)
NVML_TEMPERATURE_THRESHOLD = _declare(
    _G,
    "gauge",
    "nvml_temperature_threshold_celsius",
    "Temperature at which the GPU shuts down or slows down, and the highest at which it and its memory may work.",
    (*GPU, "threshold"),
)
NVML_CLOCK = _declare(
    _G,
    "gauge",
    "nvml_clock_hertz",
    "Clock by domain: graphics, sm, memory, video.",
    (*GPU, "domain"),
)
NVML_CLOCK_MAX = _declare(
    _G, "gauge", "nvml_clock_max_hertz", "Highest clock by domain.", (*GPU, "domain")
)
NVML_THROTTLE = _declare(
    _G,
    "gauge",
    "nvml_throttle_active",
    "1 for each reason that holds the clocks down now, else 0.",
    (*GPU, "reason"),
)
NVML_PERFORMANCE_STATE = _declare(
    _G, "gauge", "nvml_performance_state", "Performance state from 0 (fastest) to 15.", GPU
)
NVML_FAN_SPEED = _declare(
    _G,
    "gauge",
    "nvml_fan_speed_ratio",
    "Intended speed of the fan as a share of its highest.",
    (*GPU, "fan"),
)

_G = "NVML: PCIe and NVLink"
NVML_PCIE_GENERATION = _declare(
    _G, "gauge", "nvml_pcie_link_generation", "PCIe generation of the link now.", GPU
)
NVML_PCIE_MAX_GENERATION = _declare(
    _G,
    "gauge",
    "nvml_pcie_link_max_generation",
    "Highest PCIe generation that GPU and slot can do.",
    GPU,
)
NVML_PCIE_WIDTH = _declare(_G, "gauge", "nvml_pcie_link_width", "Lanes of the PCIe link now.", GPU)
NVML_PCIE_MAX_WIDTH = _declare(
    _G, "gauge", "nvml_pcie_link_max_width", "Most PCIe lanes that GPU and slot can do.", GPU
)
NVML_PCIE_REPLAYS = _declare(
    _G, "counter", "nvml_pcie_replays_total", "Packets that had to be sent again over PCIe.", GPU
)
NVML_PCIE_THROUGHPUT = _declare(
    _G,
    "gauge",
    "nvml_pcie_throughput_bytes_per_second",
    "Bytes over PCIe in 20 ms of the scrape, by direction: rx, tx; only with the setting pcie_throughput.",
    (*GPU, "direction"),
)
NVML_GPM_PCIE = _declare(
    _G,
    "gauge",
    "nvml_gpm_pcie_bytes_per_second",
    "Mean bytes over PCIe since the previous scrape, by direction: rx, tx.",
    (*GPU, "direction"),
)
NVML_NVLINK_UP = _declare(
    _G, "gauge", "nvml_nvlink_up", "1 if the NVLink is up, else 0.", (*GPU, "link")
)
NVML_NVLINK_ERRORS = _declare(
    _G,
    "counter",
    "nvml_nvlink_errors_total",
    "Errors over all NVLinks of the GPU, by kind: replay, recovery, crc_flit, crc_data, ecc_data.",
    (*GPU, "kind"),
)
NVML_NVLINK_BYTES = _declare(
    _G,
    "counter",
    "nvml_nvlink_bytes_total",
    "Bytes over all NVLinks of the GPU, by direction: rx, tx.",
    (*GPU, "direction"),
)
NVML_GPM_NVLINK = _declare(
    _G,
    "gauge",
    "nvml_gpm_nvlink_bytes_per_second",
    "Mean bytes over all NVLinks since the previous scrape, by direction: rx, tx.",
    (*GPU, "direction"),
)

_G = "NVML: errors"
NVML_XID_ERRORS = _declare(
    _G,
    "counter",
    "nvml_xid_errors_total",
    "XID errors by code since the exporter started; the most frequent codes stand at 0 before the first one.",
    (*GPU, "xid"),
)
NVML_XID_LAST = _declare(
    _G,
    "gauge",
    "nvml_xid_last_timestamp_seconds",
    "Unix time of the newest XID error by code.",
    (*GPU, "xid"),
)
NVML_EVENTS = _declare(
    _G,
    "counter",
    "nvml_events_total",
    "Other events since the exporter started, such as double_bit_ecc_error or gpu_recovery_action.",
    (*GPU, "event"),
)
NVML_ECC_ENABLED = _declare(_G, "gauge", "nvml_ecc_enabled", "1 if ECC is on, else 0.", GPU)
NVML_ECC_ERRORS = _declare(
    _G,
    "counter",
    "nvml_ecc_errors_total",
    "ECC errors by kind (corrected, uncorrected) and scope: volatile (since the driver was loaded) or aggregate.",
    (*GPU, "kind", "scope"),
)
NVML_REMAPPED_ROWS = _declare(
    _G,
    "gauge",
    "nvml_remapped_rows",
    "Rows of memory that were remapped, by the kind of error: correctable, uncorrectable.",
    (*GPU, "kind"),
)
NVML_ROW_REMAP_PENDING = _declare(
    _G,
    "gauge",
    "nvml_row_remap_pending",
    "1 if a row waits for a reset of the GPU to be remapped, else 0.",
    GPU,
)
NVML_ROW_REMAP_FAILED = _declare(
    _G, "gauge", "nvml_row_remap_failed", "1 if remapping a row failed, else 0.", GPU
)
NVML_RETIRED_PAGES = _declare(
    _G,
    "gauge",
    "nvml_retired_pages",
    "Pages of memory that were retired, by cause: multiple_single_bit, double_bit; GPUs before Ampere.",
    (*GPU, "cause"),
)
NVML_RETIRED_PAGES_PENDING = _declare(
    _G,
    "gauge",
    "nvml_retired_pages_pending",
    "1 if a page waits for a reset of the GPU to be retired, else 0.",
    GPU,
)
NVML_RECOVERY_ACTION = _declare(
    _G,
    "gauge",
    "nvml_recovery_action",
    "1 for what the driver asks to be done to recover the GPU, such as none, gpu_reset, node_reboot, drain_and_reset.",
    (*GPU, "action"),
)

_G = "The exporter watching itself"
BUILD_INFO = _declare(_G, "info", "torchmem_exporter_build_info", "Version of torchmem and Python.")
COLLECTOR_SUCCESS = _declare(
    _G,
    "gauge",
    "torchmem_exporter_collector_success",
    "1 if the collector succeeded in this scrape.",
    ("collector",),
)
COLLECTOR_DURATION = _declare(
    _G,
    "gauge",
    "torchmem_exporter_collector_duration_seconds",
    "Duration of the collector.",
    ("collector",),
)
REJECTED_SAMPLES = _declare(
    _G,
    "counter",
    "torchmem_exporter_rejected_samples_total",
    "Files of the run directory that were refused, by reason.",
    ("reason",),
)
