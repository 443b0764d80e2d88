"""The series of prometheus/rules/recording-*.yml that the dashboards read, with the labels they are narrowed by."""

from __future__ import annotations

from torchmem.sample.catalog import DEVICE, GPU, RANK, MetricSpec


def _rule(name: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "gauge", "Recorded by prometheus/rules.", labels, "Recording rules")


LIVE = _rule("rank:torchmem_process_state:live", "instance", *RANK)
STRANDED_RATIO = _rule("rank:torchmem_stranded_bytes:ratio", "instance", *DEVICE)
LEAST_HEADROOM = _rule("rank:torchmem_headroom_bytes:min5m", "instance", *DEVICE)
EXHAUSTION = _rule("rank:torchmem_headroom_exhaustion:seconds", "instance", *DEVICE)
PEAK_SLACK = _rule("rank:torchmem_peak_slack:ratio", "instance", *DEVICE)
RETRIES_10M = _rule("rank:torchmem_alloc_retries:increase10m", "instance", *DEVICE)
PEAK_GROWTH = _rule("rank:torchmem_allocated_peak_bytes:perhour", "instance", *DEVICE)
IMBALANCE = _rule("rank:torchmem_active_peak_bytes:imbalance", "instance", *DEVICE)

PART = _rule("gpu:torchmem_memory_bytes:sum", "instance", *GPU, "part")
TOTAL = _rule("gpu:torchmem_memory_total_bytes:max", "instance", *GPU)
IDLE_HELD = _rule("gpu:nvml_idle_held:bool", "instance", *GPU)
IDLE_HELD_1H = _rule("gpu:nvml_idle_held:ratio1h", "instance", *GPU)
WASTED = _rule("gpu:torchmem_wasted:ratio", "instance", *GPU)

RUN_RANKS = _rule("run:torchmem_ranks:count", "run", "state")
RUN_RESERVED = _rule("run:torchmem_reserved_bytes:sum", "run")
RUN_RESERVED_MAX = _rule("run:torchmem_reserved_bytes:max", "run")
RUN_STRANDED_RATIO = _rule("run:torchmem_stranded_bytes:ratio", "run")
RUN_HEADROOM = _rule("run:torchmem_headroom_bytes:min", "run")
RUN_SLACK = _rule("run:torchmem_peak_slack:max", "run")
RUN_IMBALANCE = _rule("run:torchmem_active_peak_bytes:imbalance", "run")
RUN_RETRIES = _rule("run:torchmem_alloc_retries:rate5m", "run")
RUN_OOMS = _rule("run:torchmem_ooms:increase1h", "run", "cause")
RUN_STEP = _rule("run:torchmem_step_duration_seconds:mean5m", "run")

NODE_GPUS = _rule("instance:nvml_gpus:count", "instance")
NODE_GPUS_LOST = _rule("instance:nvml_gpus_lost:count", "instance")
NODE_IDLE_HELD = _rule("instance:nvml_idle_held_gpus:sum", "instance")
NODE_WASTED = _rule("instance:torchmem_wasted_gpus:sum", "instance")
NODE_PART = _rule("instance:torchmem_memory_bytes:sum", "instance", "part")
NODE_TOTAL = _rule("instance:torchmem_memory_total_bytes:sum", "instance")

# What Prometheus itself knows of alerts and of its scrapes.
ALERTS = _rule("ALERTS", "instance", *DEVICE, "alertname", "alertstate", "severity")
ALERTS_SINCE = _rule("ALERTS_FOR_STATE", "instance", *DEVICE, "alertname", "severity")
UP = _rule("up", "instance")
SCRAPE_DURATION = _rule("scrape_duration_seconds", "instance")
SCRAPE_SAMPLES = _rule("scrape_samples_scraped", "instance")
