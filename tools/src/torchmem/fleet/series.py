"""The series that the report reads, and how it asks for them.

The rules in manifests/rule_templates/recording-report.yml record those of whole runs.
"""

from __future__ import annotations

from torchmem.fleet.store import Query
from torchmem.metrics import catalog

GPUS = "run:torchmem_gpus:count"
LOST = "run:torchmem_oom_lost_gpus:sum"
STRANDED = "run:torchmem_stranded_gpus:sum"
IDLE = "run:nvml_idle_held_gpus:sum"
EMPTY = "run:nvml_assigned_empty_gpus:sum"
NEED = "run:torchmem_peak_need_bytes:max"
STEP_PEAK = "run:torchmem_step_peak_bytes:max"
DEVICE_TOTAL = "run:torchmem_device_total_bytes:min"
OOM_END = "rank:torchmem_oom_end:timestamp"
ALL_GPUS = "cluster:nvml_gpus:count"
ALL_IDLE = "cluster:nvml_idle_held_gpus:sum"
ALL_WASTED = "cluster:torchmem_wasted_gpus:sum"
PRICE = "cluster:torchmem_gpu_hour_price:max"
PRICED_GPUS = "cluster:torchmem_priced_gpus:count"
PRICED_IDLE = "cluster:nvml_idle_held_priced_gpus:sum"
PRICED_WASTED = "cluster:torchmem_wasted_priced_gpus:sum"

START = catalog.PROCESS_START.name
SEEN = catalog.SAMPLE_TIMESTAMP.name
STATE = catalog.PROCESS_STATE.name
STEPS = catalog.STEPS.name
KILL_CAUSE = catalog.KILL_CAUSE.name


def hours(selector: str) -> Query:
    """Return the query of a number of GPUs added up over time: GPU-hours.

    A value for each minute, as the dashboards do. The second less keeps both ends of the time from
    being counted, in every version of Prometheus.
    """
    return lambda seconds: f"sum_over_time({selector}[{seconds - 1}s:1m]) / 60"


def over(which: str, selector: str, equals: str = "") -> Query:
    """Return the query of the last, max or min values, of series that have ended too."""
    return lambda seconds: f"{which}_over_time({selector}[{seconds}s]){equals}"
