"""Series that the dashboards read besides torchmem's own: recorded, Prometheus', and engines'."""

from __future__ import annotations

from torchmem.manifests import counters
from torchmem.metrics.catalog import DEVICE, GPU, RANK, MetricSpec


def _recorded(name: str, *labels: str) -> MetricSpec:
    return MetricSpec(
        name, "gauge", "Recorded by prometheus/rules.", ("job", *labels), "Recording rules"
    )


LIVE = _recorded("rank:torchmem_process_state:live", "instance", *RANK)
KNOWN_RANKS = _recorded(counters.KNOWN_RANKS, "instance", *RANK, "state")
NEWEST_STATE = _recorded("rank:torchmem_process_state:newest", "instance", *RANK, "state")
STRANDED_RATIO = _recorded("rank:torchmem_stranded_bytes:ratio", "instance", *DEVICE)
MIN_HEADROOM = _recorded("rank:torchmem_headroom_bytes:min5m", "instance", *DEVICE)
HEADROOM_FALL = _recorded("rank:torchmem_headroom_bytes:fall10m", "instance", *DEVICE)
PEAK_MARGIN = _recorded("rank:torchmem_peak_margin_bytes:ratio", "instance", *DEVICE)
PLANNED_MARGIN = _recorded("rank:torchmem_planned_margin_bytes:ratio", "instance", *DEVICE)
EXHAUSTION = _recorded("rank:torchmem_peak_margin_exhaustion:seconds", "instance", *DEVICE)
THREAT_COUNT = _recorded("rank:torchmem_threat:count5m", "instance", *DEVICE, "threat")
GROWTH_LEFT = _recorded("rank:torchmem_step_growth_seconds:left", "instance", *DEVICE, "kind")
PEAK_SLACK = _recorded("rank:torchmem_peak_slack:ratio", "instance", *DEVICE)
RETRIES_10M = _recorded("rank:torchmem_alloc_retries:increase10m", "instance", *DEVICE)
POSITIVE_OOMS = _recorded(counters.POSITIVE_OOMS, "instance", *DEVICE, "cause")
PEAK_GROWTH = _recorded("rank:torchmem_allocated_peak_bytes:perhour", "instance", *DEVICE)
IMBALANCE = _recorded("rank:torchmem_active_peak_bytes:imbalance", "instance", *DEVICE)

PART = _recorded("gpu:torchmem_memory_bytes:sum", "instance", *GPU, "part")
TOTAL = _recorded("gpu:torchmem_memory_total_bytes:max", "instance", *GPU)
IDLE_HELD = _recorded("gpu:nvml_idle_held:bool", "instance", *GPU)
SHORT_NAME = _recorded("gpu:nvml_short_name:info", "instance", *GPU, "short_name")
HEALTH = _recorded("gpu:nvml_health:info", "instance", *GPU, "health")
WASTED = _recorded("gpu:torchmem_wasted:ratio", "instance", *GPU)

RUN_RESERVED = _recorded("run:torchmem_reserved_bytes:sum", "run", "launch")
RUN_RESERVED_MAX = _recorded("run:torchmem_reserved_bytes:max", "run", "launch")
RUN_STRANDED_RATIO = _recorded("run:torchmem_stranded_bytes:ratio", "run", "launch")
RUN_HEADROOM = _recorded("run:torchmem_headroom_bytes:min", "run", "launch")
RUN_SLACK = _recorded("run:torchmem_peak_slack:max", "run", "launch")
RUN_IMBALANCE = _recorded("run:torchmem_active_peak_bytes:imbalance", "run", "launch")
RUN_RETRIES = _recorded("run:torchmem_alloc_retries:rate5m", "run", "launch")
RUN_OOMS = _recorded("run:torchmem_ooms:increase1h", "run", "launch", "cause")
RUN_STEP = _recorded("run:torchmem_step_duration_seconds:mean5m", "run", "launch")

# What reports add up. The model is there if it has a price.
OWNER = ("user", "team", "namespace", "model")
RUN_GPUS = _recorded("run:torchmem_gpus:count", "run", "launch", *OWNER)
RUN_LOST_GPUS = _recorded("run:torchmem_oom_lost_gpus:sum", "run", "launch", *OWNER)
RUN_STRANDED_GPUS = _recorded("run:torchmem_stranded_gpus:sum", "run", "launch", *OWNER)
RUN_IDLE_GPUS = _recorded("run:nvml_idle_held_gpus:sum", "run", "launch", *OWNER)
RUN_EMPTY_GPUS = _recorded("run:nvml_assigned_empty_gpus:sum", *OWNER)
PRICED_GPUS = _recorded("cluster:torchmem_priced_gpus:count", "model")
MODEL_PRICE = _recorded("cluster:torchmem_gpu_hour_price:max", "model", "currency")
RUN_PEAK_NEED = _recorded("run:torchmem_peak_need_bytes:max", "run", "launch")
RUN_STEP_PEAK = _recorded("run:torchmem_step_peak_bytes:max", "run", "launch")
RUN_DEVICE_TOTAL = _recorded("run:torchmem_device_total_bytes:min", "run", "launch")
OOM_END = _recorded(
    "rank:torchmem_oom_end:timestamp", "instance", *RANK, "cause", "onset", "remedy"
)

# How far a run is from the median of the last day of its runs.
RUN_RESERVED_DEVIATION = _recorded("run:torchmem_reserved_bytes:deviation", "run", "launch")
RUN_STRANDED_DEVIATION = _recorded("run:torchmem_stranded_bytes:deviation", "run", "launch")
RUN_STEP_DEVIATION = _recorded("run:torchmem_step_duration_seconds:deviation", "run", "launch")

NODE_GPUS = _recorded("instance:nvml_gpus:count", "instance")
NODE_IDLE_HELD = _recorded("instance:nvml_idle_held_gpus:sum", "instance")
NODE_WASTED = _recorded("instance:torchmem_wasted_gpus:sum", "instance")
NODE_POWER = _recorded("instance:nvml_power_watts:sum", "instance")
NODE_PART = _recorded("instance:torchmem_memory_bytes:sum", "instance", "part")
NODE_TOTAL = _recorded("instance:torchmem_memory_total_bytes:sum", "instance")

# What Prometheus records about alerts and its own scrapes.
ALERTS = _recorded("ALERTS", "instance", *DEVICE, "alertname", "alertstate", "severity", "cause")
ALERTS_SINCE = _recorded("ALERTS_FOR_STATE", "instance", *DEVICE, "alertname", "severity")
UP = _recorded("up", "instance")
SCRAPE_DURATION = _recorded("scrape_duration_seconds", "instance")
SCRAPE_SAMPLES = _recorded("scrape_samples_scraped", "instance")


def _engines_own(name: str, label: str) -> MetricSpec:
    """Return a metric that the engine itself serves; it names the run as the model."""
    return MetricSpec(name, "gauge", "Exported by the engine.", (label,), "Engines")


VLLM_USE = _engines_own("vllm:kv_cache_usage_perc", "model_name")
VLLM_PREEMPTIONS = _engines_own("vllm:num_preemptions_total", "model_name")
SGLANG_USE = _engines_own("sglang:token_usage", "model_name")
SGLANG_WEIGHTS = _engines_own("sglang:weight_memory_usage_gb", "model_name")
SGLANG_CACHE = _engines_own("sglang:kv_cache_memory_usage_gb", "model_name")
SGLANG_GRAPHS = _engines_own("sglang:graph_memory_usage_gb", "model_name")
ENGINES_OWN = (
    VLLM_USE,
    VLLM_PREEMPTIONS,
    SGLANG_USE,
    SGLANG_WEIGHTS,
    SGLANG_CACHE,
    SGLANG_GRAPHS,
)
"""What engines serve themselves, which Prometheus scrapes from them."""
