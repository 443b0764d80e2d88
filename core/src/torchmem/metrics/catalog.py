"""Every metric of torchmem, declared once: name, kind, help text, labels and documentation group.

The metric families, docs/metrics.md, the rules, the dashboards and the tests read or check this
file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partialmethod
from typing import Literal

Kind = Literal["gauge", "counter", "histogram", "gaugehistogram", "info"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric: its name as Prometheus shows it, kind, help text and label names in order.

    `is_detail`: no rule and no panel reads it, and the exporter serves it only with `all_series`.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    group: str
    is_detail: bool = False


CATALOG: dict[str, MetricSpec] = {}

RANK = ("rank", "pid", "run", "launch")
GPU = ("gpu", "uuid")
DEVICE = (*GPU, *RANK)


@dataclass(frozen=True)
class _Group:
    """A group of the documentation whose metrics share their first labels."""

    name: str
    labels: tuple[str, ...] = ()

    def _declare(
        self, kind: Kind, name: str, help_text: str, *labels: str, is_detail: bool = False
    ) -> MetricSpec:
        if name in CATALOG:
            raise ValueError(f"metric {name} is declared twice")
        CATALOG[name] = spec = MetricSpec(
            name, kind, help_text, (*self.labels, *labels), self.name, is_detail
        )
        return spec

    gauge = partialmethod(_declare, "gauge")
    counter = partialmethod(_declare, "counter")
    histogram = partialmethod(_declare, "histogram")
    gauge_histogram = partialmethod(_declare, "gaugehistogram")
    info = partialmethod(_declare, "info")


_group = _Group("Allocator, per rank and device", DEVICE)
ALLOCATED = _group.gauge(
    "torchmem_allocated_bytes", "Bytes in blocks allocated to tensors.", "pool"
)
ACTIVE = _group.gauge(
    "torchmem_active_bytes",
    "Allocated bytes plus freed blocks that another stream still uses.",
    "pool",
)
RESERVED = _group.gauge(
    "torchmem_reserved_bytes", "Bytes the allocator has reserved from the driver.", "pool"
)
REQUESTED = _group.gauge(
    "torchmem_requested_bytes",
    "Bytes requested by the program, before rounding.",
    "pool",
    is_detail=True,
)
INACTIVE_SPLIT = _group.gauge(
    "torchmem_inactive_split_bytes",
    "Free bytes in split segments, which cannot be released; absent with expandable segments.",
    "pool",
    is_detail=True,
)
ALLOCATED_PEAK = _group.gauge(
    "torchmem_allocated_peak_bytes", "Highest allocated bytes since the process started."
)
ACTIVE_PEAK = _group.gauge(
    "torchmem_active_peak_bytes", "Highest active bytes since the process started."
)
RESERVED_PEAK = _group.gauge(
    "torchmem_reserved_peak_bytes", "Highest reserved bytes since the process started."
)
COMPONENT = _group.gauge(
    "torchmem_component_bytes",
    "What the active bytes consist of: parameters, gradients, optimizer_state, held (what else "
    "lives between steps), step (allocated since the end of the latest step that was read), "
    "pending (freed, but waiting for another stream), rounding, and the parts that the script "
    "tracks. They add up to the active bytes.",
    "component",
)
COMPONENT_PEAK = _group.gauge(
    "torchmem_component_peak_bytes",
    "What the active bytes consisted of at their peak, with step (allocated within the step: "
    "activations, temporaries, and what of them waits for another stream); gradients_or_step where "
    "the two cannot be told apart. They add up to the active peak.",
    "component",
)
COMPONENT_PEAK_TIMESTAMP = _group.gauge(
    "torchmem_component_peak_timestamp_seconds",
    "Unix time at the end of the step that the components of the peak are from.",
    is_detail=True,
)
DEVICE_TOTAL = _group.gauge(
    "torchmem_device_total_bytes", "Total memory of the device, as CUDA reports it to the process."
)
DRIVER_FREE = _group.gauge(
    "torchmem_driver_free_bytes",
    "Free memory of the device at the driver, read with the statistics of the allocator. Absent if "
    "the device shares the host's memory.",
)
MANAGED = _group.gauge(
    "torchmem_managed_bytes",
    "Managed memory of the process (cudaMallocManaged), as paged optimizers of bitsandbytes use "
    "it, on the device or on the host. NVML counts it as used by no process. Absent without any.",
)
MEMORY_LIMIT = _group.gauge(
    "torchmem_memory_limit_bytes",
    "What the memory fraction of the process lets it reserve; absent without a fraction below 1.",
)
STATS_TIMESTAMP = _group.gauge(
    "torchmem_stats_timestamp_seconds",
    "Unix time at which the statistics of the allocator and the driver's free memory were read.",
    is_detail=True,
)
PLANNED_PEAK = _group.gauge(
    "torchmem_planned_peak_bytes",
    "Highest active bytes to expect of the largest batch that the script plans, by a line through "
    "the peaks of earlier batches; absent without a plan, or while they show no such line.",
)
PHASE_PEAK = _group.gauge(
    "torchmem_phase_allocated_peak_bytes",
    "Highest allocated bytes observed in a phase that the training script named.",
    "phase",
)

_group = _Group("Fragmentation, from snapshots at random times", DEVICE)
SEGMENTS = _group.gauge("torchmem_segments", "Segments of the default pools, by pool.", "pool")
BLOCKS = _group.gauge(
    "torchmem_blocks",
    "Blocks of the default pools, by pool and state.",
    "pool",
    "state",
    is_detail=True,
)
FREE = _group.gauge(
    "torchmem_free_bytes",
    "Cached free bytes: releasable (whole free segments) or stranded (beside live blocks).",
    "state",
)
SNAPSHOT_IN_USE = _group.gauge(
    "torchmem_snapshot_in_use_bytes",
    "Bytes that were not free in the newest snapshot, in all pools; absent after a release.",
)
PENDING_FREE = _group.gauge(
    "torchmem_pending_free_bytes",
    "Freed bytes that still wait for the event of another stream.",
    is_detail=True,
)
LARGEST_FREE_BLOCK = _group.gauge(
    "torchmem_largest_free_block_bytes",
    "Largest free block in the default pools.",
    is_detail=True,
)
LARGEST_ALLOCATED_BLOCK = _group.gauge(
    "torchmem_largest_allocated_block_bytes",
    "Largest block in the default pools that is allocated to a tensor.",
)
FRAGMENTATION = _group.gauge(
    "torchmem_fragmentation_ratio",
    "1 - largest free block / free bytes, in the default pools; absent when nothing is free.",
)
FREE_BLOCK_SIZE = _group.gauge_histogram(
    "torchmem_free_block_size_bytes", "Free blocks of the default pools, by size."
)
HEADROOM = _group.gauge(
    "torchmem_headroom_bytes",
    "Largest single allocation that would succeed now, without or with a flush of the cache.",
    "flush",
)
PRIVATE_POOL = _group.gauge(
    "torchmem_private_pool_bytes", "Memory of CUDA graphs and MemPools, used or free.", "state"
)
SNAPSHOT_TIMESTAMP = _group.gauge(
    "torchmem_snapshot_timestamp_seconds",
    "Unix time of the snapshot that the metrics of this group are computed from.",
)

_group = _Group("Pressure and failures", DEVICE)
ALLOC_RETRIES = _group.counter(
    "torchmem_alloc_retries_total",
    "Times the allocator emptied its cache to retry a failed allocation.",
)
OOMS = _group.counter(
    "torchmem_ooms_total",
    "OutOfMemoryErrors raised, caught or not, by cause: capacity, fragmentation, limit, external, "
    "pending; those of libraries that nothing caught: library; and engines that could not wake up.",
    "cause",
)
OOM_REJECTIONS = _group.counter(
    "torchmem_oom_rejections_total",
    "Allocations rejected without asking the driver.",
    is_detail=True,
)
DEVICE_ALLOCS = _group.counter(
    "torchmem_device_allocs_total",
    "Segments allocated from the driver, by cudaMalloc or a map operation.",
)
DEVICE_FREES = _group.counter(
    "torchmem_device_frees_total",
    "Segments returned to the driver, by cudaFree or an unmap operation.",
)
STREAM_SYNCS = _group.counter(
    "torchmem_stream_syncs_total", "Times the allocator waited for all streams."
)
RELEASES = _group.counter(
    "torchmem_releases_total",
    "Times a tier of the setting `release` returned memory to the driver.",
    "tier",
)
RELEASED = _group.counter(
    "torchmem_released_bytes_total",
    "Bytes that a tier of the setting `release` returned to the driver.",
    "tier",
)
RELEASE_SECONDS = _group.counter(
    "torchmem_release_seconds_total",
    "Time that releases took, also of one that still lasts.",
    "tier",
)
RELEASE_ENABLED = _group.gauge(
    "torchmem_release_enabled",
    "1 while a tier of the setting `release` is on, 0 after it was given up.",
    "tier",
)
NEIGHBOR_REQUESTS = _group.counter(
    "torchmem_neighbor_requests_total",
    "Times the process asked the other processes on the GPU for memory.",
)
MEMORY_WAIT = _group.counter(
    "torchmem_memory_wait_seconds_total",
    "Time that the script waited for memory in `session.wait_for_memory`.",
    is_detail=True,
)
LAST_OOM_TIMESTAMP = _group.gauge(
    "torchmem_last_oom_timestamp_seconds", "Unix time of the latest OutOfMemoryError."
)
LAST_OOM_REQUESTED = _group.gauge(
    "torchmem_last_oom_requested_bytes",
    "Bytes requested from the driver when the latest OutOfMemoryError was raised.",
)
LAST_OOM_INFO = _group.info(
    "torchmem_last_oom_info",
    "The latest OutOfMemoryError: the change that would have made room (cause), what had changed "
    "(onset), the line of the script that requested memory (line, function), and the first advice "
    "of `torchmem why` (remedy).",
)
GROWTH = _group.gauge(
    "torchmem_step_growth_bytes",
    "Bytes by which memory grows in each step: what is kept between steps (kind kept), what a step "
    "needs beside it (larger_step), or what is outside the allocator (outside). Absent if nothing "
    "grows.",
    "kind",
)
GROWTH_START = _group.gauge(
    "torchmem_step_growth_start_steps", "Steps that had ended when this growth began.", "kind"
)

_group = _Group("Judgment of living ranks", (*DEVICE, "threat"))
THREAT_INFO = _group.info(
    "torchmem_threat_info",
    "1 for what `torchmem why` says first about the memory of a living rank: failed (an allocation "
    "has failed, and no step has ended since); leak, kept, larger_step or outside, which grow, "
    "with the component that grows most, where it is known (component); fragmentation, capacity, "
    "external, library. With its first advice (remedy). Absent while nothing threatens it.",
)
THREAT = _group.gauge(
    "torchmem_threat_bytes",
    "Bytes that this is about: those that have grown, are stranded (fragmentation), could be "
    "given back (library), or are left (capacity, external).",
)

_group = _Group("Process and steps", RANK)
PROCESS_INFO = _group.info(
    "torchmem_process_info",
    "Process metadata: ranks, host name, script, versions, scheduler IDs.",
)
ALLOCATOR_INFO = _group.info("torchmem_allocator_info", "Allocator settings in effect.")
SETTING_IGNORED = _group.gauge(
    "torchmem_allocator_setting_ignored",
    "1 if PyTorch ignores a setting of PYTORCH_CUDA_ALLOC_CONF or one of its aliases, else 0.",
    "setting",
)
PROCESS_STATE = _group.gauge(
    "torchmem_process_state",
    "1 for the current state of the process, else 0: running, stalled, exited, failed (an uncaught "
    "exception or an exit code), oom, killed.",
    "state",
)
PROCESS_START = _group.gauge(
    "torchmem_process_start_timestamp_seconds", "When the process started, in Unix seconds."
)
STEPS = _group.counter(
    "torchmem_steps_total", "Optimizer steps finished; absent until one was counted."
)
STEP_DURATION = _group.histogram(
    "torchmem_step_duration_seconds", "Time between the ends of consecutive optimizer steps."
)
SAMPLES = _group.counter(
    "torchmem_samples_total", "Training samples processed, as reported by the script."
)

_group = _Group("Host memory, per rank", RANK)
HOST_RSS = _group.gauge("torchmem_host_rss_bytes", "Resident set size of the process.")
HOST_PINNED = _group.gauge(
    "torchmem_host_pinned_bytes",
    "Pinned host memory of PyTorch's allocator, by state: used, or cached for reuse.",
    "state",
)
HOST_PINNED_TIMESTAMP = _group.gauge(
    "torchmem_host_pinned_timestamp_seconds",
    "Unix time at which the pinned host memory was read, which is up to 15 seconds ago.",
    is_detail=True,
)
HOST_LIMIT = _group.gauge(
    "torchmem_host_limit_bytes",
    "Tightest host memory limit: of a control group of the process, or of the machine.",
)
HOST_AVAILABLE = _group.gauge(
    "torchmem_host_available_bytes",
    "What is left below torchmem_host_limit_bytes, for all processes under that limit together.",
)
KILL_CAUSE = _group.gauge(
    "torchmem_process_kill_cause",
    "1 for the cause that killed the process, else 0: host_memory (the kernel's OOM killer) or "
    "signal (any other SIGKILL); absent while unknown.",
    "cause",
)

_group = _Group("SDK self-monitoring", RANK)
SAMPLE_TIMESTAMP = _group.gauge(
    "torchmem_sample_timestamp_seconds", "Unix time at which the process last wrote its sample."
)
SAMPLE_DURATION = _group.gauge(
    "torchmem_sample_duration_seconds",
    "Duration of the latest read, by kind: "
    "stats, snapshot, or oom (the report is written before the error is raised).",
    "kind",
)
SDK_CPU = _group.counter("torchmem_sdk_cpu_seconds_total", "CPU time used by the SDK.")
SDK_ERRORS = _group.counter(
    "torchmem_sdk_errors_total", "Errors that the SDK caught and suppressed."
)
SDK_STAGE_ERRORS = _group.counter(
    "torchmem_sdk_stage_errors_total",
    "The same errors by stage; a stage without an error has no series.",
    "stage",
)
HOOKS_DROPPED = _group.counter(
    "torchmem_pressure_hooks_dropped_total",
    "Functions of `session.on_pressure` that are no longer called, because one raised, was slow, "
    "or freed nothing (empty).",
    "fault",
)

_group = _Group("Inference engines", DEVICE)
ENGINE_MEMORY = _group.gauge(
    "torchmem_engine_memory_bytes",
    "Memory of the inference engine in the process by the engine's own parts (vLLM's tags weights, "
    "kv_cache, runtime, workspace and cudagraph, and lora), resident on the device or asleep: "
    "given back to the driver until the engine wakes up.",
    "part",
    "state",
)
ENGINE_PLANNED = _group.gauge(
    "torchmem_engine_planned_bytes",
    "What the engine planned at its start, by its profile run: weights, activations, cudagraph, "
    "kv_cache, and other (what it found in use besides the weights).",
    "part",
)
ENGINE_PEAK = _group.gauge(
    "torchmem_engine_peak_bytes",
    "The most that the engine has used of each part since it was ready to serve.",
    "part",
)
ENGINE_KV_CACHE_ADVICE = _group.gauge(
    "torchmem_engine_kv_cache_advice_bytes",
    "The size of the KV cache that the peaks so far leave room for within the memory that the "
    "engine was given, with a margin: for vLLM's --kv-cache-memory. Absent before the engine has "
    "made 1,000 steps.",
)
ENGINE_SLEEPS = _group.counter(
    "torchmem_engine_sleeps_total", "Times the engine has gone to sleep."
)
ENGINE_SLEEP_RESIDUAL = _group.gauge(
    "torchmem_engine_sleep_residual_bytes",
    "Bytes that PyTorch still had on the device after the engine went to sleep the last time.",
)
ENGINE_SLEEP_RESIDUAL_GROWTH = _group.gauge(
    "torchmem_engine_sleep_residual_growth_bytes",
    "By how much torchmem_engine_sleep_residual_bytes grows with each of the latest 16 sleeps, 0 "
    "if it does not. Absent before 4.",
)
_group = _Group("Join of allocator and NVML", DEVICE)
OUTSIDE_ALLOCATOR = _group.gauge(
    "torchmem_outside_allocator_bytes",
    "Process memory in NVML minus reserved bytes: CUDA context, NCCL, cuBLAS, other libraries, and "
    "the managed memory that is on the device. The value of the latest moment at which both were "
    "known.",
)
OUTSIDE_ALLOCATOR_TIMESTAMP = _group.gauge(
    "torchmem_outside_allocator_timestamp_seconds",
    "Unix time at which torchmem_outside_allocator_bytes was measured.",
    is_detail=True,
)
MISPLACED = _group.gauge(
    "torchmem_misplaced_bytes",
    "What the rank holds, as NVML reports it, on this GPU that is another rank's of its launch; "
    "absent if it holds less than a context.",
)
RESERVED_UNBACKED = _group.gauge(
    "torchmem_reserved_unbacked_bytes",
    "Reserved bytes that are not on the device, because an allocator outside PyTorch has returned "
    "them to the driver, as in vLLM's sleep mode; known if NVML shows less memory of the process "
    "than it has reserved. Reserved bytes plus those outside the allocator minus these are the "
    "process memory in NVML. Absent otherwise.",
)
ENGINE_WAKE_MARGIN = _group.gauge(
    "torchmem_engine_wake_margin_bytes",
    "Free memory of the device minus what the sleeping engine takes again when it wakes up. Below "
    "zero, waking it up fails. Absent while the engine is awake.",
)
OUTSIDE_ALLOCATOR_START = _group.gauge(
    "torchmem_outside_allocator_start_bytes",
    "Bytes outside the allocator at the SDK's first read of the device, usually within a "
    "second of the creation of the CUDA context; absent if the exporter cannot tell.",
)

_group = _Group("Outside PyTorch's allocator", DEVICE)
COMMUNICATOR = _group.gauge(
    "torchmem_communicator_bytes",
    "Memory of NCCL's or RCCL's communicators by process group (its description, else its name): "
    "persistent, suspendable, or suspended and so not on the device, as NCCL counts. Before NCCL "
    "2.29.7 and PyTorch 2.12: estimated, the growth outside the allocator when they were created.",
    "group",
    "state",
)
RMM_POOL = _group.gauge(
    "torchmem_rmm_pool_bytes", "Bytes that the pool of RAPIDS' memory manager (RMM) has taken."
)
RMM_USED = _group.gauge(
    "torchmem_rmm_used_bytes",
    "Bytes allocated from RMM, if the script counts them (rmm.statistics.enable_statistics).",
)
RMM_PEAK = _group.gauge("torchmem_rmm_peak_bytes", "The most of torchmem_rmm_used_bytes.")

_NVML_DEVICES = "NVML: devices and memory"
_group = _Group(_NVML_DEVICES)
NVML_UP = _group.gauge(
    "nvml_up",
    "1 if NVML responds, else 0 with the reason; outdated_pynvml at 1: values are missing.",
    "reason",
)
NVML_DRIVER_INFO = _group.info(
    "nvml_driver_info",
    "Versions of the driver, of NVML and of the latest supported CUDA; platform is wsl under WSL.",
)

_group = _Group(_NVML_DEVICES, GPU)
NVML_GPU_UP = _group.gauge(
    "nvml_gpu_up", "1 if the GPU responds, 0 if it is lost or a call to it hangs."
)
NVML_GPU_ERROR = _group.gauge(
    "nvml_gpu_error_code", "NVML return code of the latest failed call to the GPU."
)
NVML_GPU_INFO = _group.info(
    "nvml_gpu_info",
    "Name, PCI bus ID, driver, VBIOS, compute mode and persistence mode of the GPU.",
)
GPU_HOUR_PRICE = _group.gauge(
    "torchmem_gpu_hour_price",
    "Price of an hour of the GPU, by the driver's name of its model; absent unless the setting "
    "gpu_hour_prices has one.",
    "model",
    "currency",
)
NVML_MEMORY_TOTAL = _group.gauge("nvml_memory_total_bytes", "Total memory of the GPU.")
NVML_MEMORY_USED = _group.gauge("nvml_memory_used_bytes", "Memory used by all processes.")
NVML_MEMORY_FREE = _group.gauge("nvml_memory_free_bytes", "Memory that can still be allocated.")
NVML_MEMORY_RESERVED = _group.gauge(
    "nvml_memory_reserved_bytes", "Memory reserved by the driver; used + free + reserved = total."
)
NVML_UNIFIED_MEMORY = _group.gauge(
    "nvml_unified_memory",
    "1 if the GPU shares the CPU's memory, so that NVML reports no GPU memory; else 0.",
)
NVML_BAR1_TOTAL = _group.gauge(
    "nvml_bar1_total_bytes",
    "Size of BAR1, the window through which the CPU and other devices access GPU memory.",
)
NVML_BAR1_USED = _group.gauge("nvml_bar1_used_bytes", "BAR1 memory in use.")
NVML_MIG_ENABLED = _group.gauge("nvml_mig_enabled", "1 if the GPU is in MIG mode, else 0.")

_group = _Group(_NVML_DEVICES, (*GPU, "gpu_instance"))
NVML_MIG_INFO = _group.info(
    "nvml_mig_info",
    "UUID and profile of a MIG device (one compute instance).",
    "compute_instance",
)
NVML_MIG_MEMORY_TOTAL = _group.gauge(
    "nvml_mig_memory_total_bytes", "Total memory of the GPU instance."
)
NVML_MIG_MEMORY_USED = _group.gauge(
    "nvml_mig_memory_used_bytes", "Memory used in the GPU instance."
)
NVML_MIG_MEMORY_FREE = _group.gauge(
    "nvml_mig_memory_free_bytes", "Memory that can still be allocated in the GPU instance."
)
NVML_MIG_MEMORY_RESERVED = _group.gauge(
    "nvml_mig_memory_reserved_bytes", "Memory of the GPU instance that the driver reserves."
)
NVML_MIG_ASSIGNMENT_INFO = _group.info(
    "nvml_mig_assignment_info",
    "Who was given the MIG device, as in nvml_gpu_assignment_info.",
    "compute_instance",
)
NVML_MIG_ASSIGNED_EMPTY = _group.gauge(
    "nvml_mig_assigned_empty_seconds",
    "As nvml_gpu_assigned_empty_seconds, of a MIG device.",
    "compute_instance",
)

_group = _Group("NVML: processes", GPU)
NVML_PROCESSES = _group.gauge("nvml_processes", "Number of processes on the GPU.")
NVML_PROCESS_MEMORY = _group.gauge(
    "nvml_process_memory_bytes",
    'GPU memory of one process; pid="other" is the sum over all but the largest processes.',
    "pid",
)
NVML_PROCESS_UTILIZATION = _group.gauge(
    "nvml_process_utilization_ratio",
    "Share of time in which the process ran kernels (sm) or accessed memory (memory); "
    "absent while it is idle.",
    "pid",
    "engine",
)
NVML_PROCESS_INFO = _group.info(
    "nvml_process_info",
    "Name, user, container, pod, Slurm job, systemd unit, rank, run and launch of a process on the "
    'GPU, where visible; state="dead" for a process that is gone.',
    "pid",
)
NVML_DEAD_PROCESS_MEMORY = _group.gauge(
    "nvml_dead_process_memory_bytes",
    "Memory of processes that are gone, which NVML still lists; "
    "absent unless the exporter sees the node's processes.",
)
NVML_GPU_ASSIGNMENT_INFO = _group.info(
    "nvml_gpu_assignment_info",
    "Who was given the GPU: pod, namespace and container by the kubelet, job, user and account by "
    "Slurm; needs the setting kubelet_socket or scontrol.",
)
NVML_GPU_ASSIGNED_EMPTY = _group.gauge(
    "nvml_gpu_assigned_empty_seconds",
    "How long the GPU has been assigned to a job or pod without a process on it, 0 while it has "
    "one; absent without a known assignment.",
)
NVML_UNATTRIBUTED_MEMORY = _group.gauge(
    "nvml_unattributed_memory_bytes",
    "Used memory minus the memory of all processes; "
    "absent unless NVML reports the memory of every process.",
)

_group = _Group("NVML: utilization, power and clocks", GPU)
NVML_UTILIZATION = _group.gauge(
    "nvml_utilization_ratio",
    "Share of time in which a kernel ran (gpu), memory was read or written (memory), "
    "or a media engine was busy (encoder, decoder, jpeg, ofa).",
    "engine",
)
NVML_SM_ACTIVE = _group.gauge(
    "nvml_sm_active_ratio", "Average share of SMs that were busy since the previous scrape."
)
NVML_SM_OCCUPANCY = _group.gauge(
    "nvml_sm_occupancy_ratio",
    "Average share of the maximum number of warps that were active since the previous scrape.",
)
NVML_TENSOR_ACTIVE = _group.gauge(
    "nvml_tensor_active_ratio",
    "Share of time in which tensor cores were active since the previous scrape.",
)
NVML_DRAM_ACTIVE = _group.gauge(
    "nvml_dram_active_ratio", "Share of the memory bandwidth used since the previous scrape."
)
NVML_POWER = _group.gauge("nvml_power_watts", "Power draw.")
NVML_POWER_LIMIT = _group.gauge("nvml_power_limit_watts", "Enforced power limit.")
NVML_POWER_LIMIT_MAX = _group.gauge(
    "nvml_power_limit_max_watts", "Highest power limit that can be set."
)
NVML_ENERGY = _group.counter(
    "nvml_energy_joules_total", "Energy consumed since the driver was loaded."
)
NVML_TEMPERATURE = _group.gauge("nvml_temperature_celsius", "Temperature, by sensor.", "sensor")
NVML_TEMPERATURE_THRESHOLD = _group.gauge(
    "nvml_temperature_threshold_celsius",
    "Temperature at which the GPU shuts down or slows down, "
    "and the maximum operating temperature of the GPU and of its memory.",
    "threshold",
)
NVML_CLOCK = _group.gauge(
    "nvml_clock_hertz",
    "Current clock frequency, by domain: graphics, sm, memory, video.",
    "domain",
)
NVML_CLOCK_MAX = _group.gauge(
    "nvml_clock_max_hertz", "Maximum clock frequency, by domain.", "domain"
)
NVML_THROTTLE = _group.gauge(
    "nvml_throttle_active", "1 for each reason that currently lowers the clocks, else 0.", "reason"
)
NVML_PERFORMANCE_STATE = _group.gauge(
    "nvml_performance_state", "Performance state, from 0 (fastest) to 15."
)
NVML_FAN_SPEED = _group.gauge(
    "nvml_fan_speed_ratio", "Intended fan speed as a share of the maximum.", "fan"
)

_group = _Group("NVML: PCIe and NVLink", GPU)
NVML_PCIE_GENERATION = _group.gauge(
    "nvml_pcie_link_generation", "Current generation of the PCIe link."
)
NVML_PCIE_MAX_GENERATION = _group.gauge(
    "nvml_pcie_link_max_generation", "Highest PCIe generation that GPU and slot support."
)
NVML_PCIE_WIDTH = _group.gauge("nvml_pcie_link_width", "Current number of lanes of the PCIe link.")
NVML_PCIE_MAX_WIDTH = _group.gauge(
    "nvml_pcie_link_max_width", "Maximum number of PCIe lanes that GPU and slot support."
)
NVML_PCIE_REPLAYS = _group.counter(
    "nvml_pcie_replays_total", "Packets that had to be sent again over PCIe."
)
NVML_PCIE_THROUGHPUT = _group.gauge(
    "nvml_pcie_throughput_bytes_per_second",
    "PCIe throughput during 20 ms of the scrape, by direction: rx, tx; "
    "only with the setting pcie_throughput.",
    "direction",
)
NVML_GPM_PCIE = _group.gauge(
    "nvml_gpm_pcie_bytes_per_second",
    "Average PCIe throughput since the previous scrape, by direction: rx, tx.",
    "direction",
)
NVML_NVLINK_UP = _group.gauge("nvml_nvlink_up", "1 if the NVLink is up, else 0.", "link")
NVML_NVLINK_ERRORS = _group.counter(
    "nvml_nvlink_errors_total",
    "Errors on all NVLinks of the GPU, by kind: replay, recovery, crc_flit, crc_data, ecc_data.",
    "kind",
)
NVML_NVLINK_BYTES = _group.counter(
    "nvml_nvlink_bytes_total",
    "Bytes transferred over all NVLinks of the GPU, by direction: rx, tx.",
    "direction",
)
NVML_GPM_NVLINK = _group.gauge(
    "nvml_gpm_nvlink_bytes_per_second",
    "Average throughput of all NVLinks since the previous scrape, by direction: rx, tx.",
    "direction",
)

_group = _Group("NVML: errors", GPU)
NVML_XID_ERRORS = _group.counter(
    "nvml_xid_errors_total",
    "XID errors since the exporter started, by code; the most frequent codes start at 0.",
    "xid",
)
NVML_XID_LAST = _group.gauge(
    "nvml_xid_last_timestamp_seconds", "Unix time of the latest XID error, by code.", "xid"
)
NVML_EVENTS = _group.counter(
    "nvml_events_total",
    "Other events since the exporter started, such as double_bit_ecc_error or gpu_recovery_action.",
    "event",
)
NVML_ECC_ENABLED = _group.gauge("nvml_ecc_enabled", "1 if ECC is enabled, else 0.")
NVML_ECC_ERRORS = _group.counter(
    "nvml_ecc_errors_total",
    "ECC errors, by kind (corrected, uncorrected) and scope: "
    "volatile (since the driver was loaded) or aggregate.",
    "kind",
    "scope",
)
NVML_REMAPPED_ROWS = _group.gauge(
    "nvml_remapped_rows",
    "Remapped rows of memory, by kind of error: correctable, uncorrectable.",
    "kind",
)
NVML_ROW_REMAP_PENDING = _group.gauge(
    "nvml_row_remap_pending", "1 if a row will be remapped at the next GPU reset, else 0."
)
NVML_ROW_REMAP_FAILED = _group.gauge(
    "nvml_row_remap_failed", "1 if remapping a row failed, else 0."
)
NVML_RETIRED_PAGES = _group.gauge(
    "nvml_retired_pages",
    "Retired pages of memory, by cause: multiple_single_bit, double_bit; GPUs before Ampere.",
    "cause",
)
NVML_RETIRED_PAGES_PENDING = _group.gauge(
    "nvml_retired_pages_pending", "1 if a page will be retired at the next GPU reset, else 0."
)
NVML_RECOVERY_ACTION = _group.gauge(
    "nvml_recovery_action",
    "1 for the action that the driver requests to recover the GPU, "
    "such as none, gpu_reset, node_reboot or drain_and_reset.",
    "action",
)

_group = _Group("Exporter self-monitoring")
EXPORTER_START = _group.gauge(
    "torchmem_exporter_start_timestamp_seconds", "When this exporter started, in Unix seconds."
)
BUILD_INFO = _group.info("torchmem_exporter_build_info", "Versions of torchmem and Python.")
COLLECTOR_SUCCESS = _group.gauge(
    "torchmem_exporter_collector_success",
    "1 if the collector succeeded in this scrape, else 0.",
    "collector",
)
COLLECTOR_DURATION = _group.gauge(
    "torchmem_exporter_collector_duration_seconds", "Duration of the collector.", "collector"
)
REJECTED_SAMPLES = _group.counter(
    "torchmem_exporter_rejected_samples_total",
    "Files in the run directory that were rejected, by reason.",
    "reason",
)
IMPOSSIBLE_VALUES = _group.counter(
    "torchmem_exporter_impossible_values_total",
    "Values that were left out of samples because they cannot be true, by reason.",
    "reason",
)
RUN_DIRECTORY_PROBLEM = _group.gauge(
    "torchmem_exporter_run_directory_problem",
    "1 if the run directory has this problem, so that ranks may be missing, else 0.",
    "problem",
)
RUN_DIRECTORY_SIZE = _group.gauge(
    "torchmem_exporter_run_directory_size_bytes", "Size of the run directory's file system."
)
RUN_DIRECTORY_FREE = _group.gauge(
    "torchmem_exporter_run_directory_free_bytes",
    "Bytes that users can still write to the run directory's file system.",
)
RUN_DIRECTORY_INODES = _group.gauge(
    "torchmem_exporter_run_directory_inodes",
    "Files that the run directory's file system can hold.",
)
RUN_DIRECTORY_FREE_INODES = _group.gauge(
    "torchmem_exporter_run_directory_free_inodes",
    "Files that the run directory's file system can still take.",
)
