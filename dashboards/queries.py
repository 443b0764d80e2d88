"""Every PromQL text of the dashboards, by name, built from the metric catalogue and the recording rules."""

from __future__ import annotations

from torchmem.core import catalog
from torchmem.core.catalog import DEVICE, GPU, RANK, MetricSpec

# Dashboard variables that narrow a query, by the label they apply to; `instance` is on every scraped series.
FILTERS = {"instance": "$node", "uuid": "$gpu", "run": "$run", "rank": "$rank"}

PROCESS = ("job", "instance", *RANK)
ROW = "instance, gpu, uuid, rank, pid, run"


def _rule(name: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "gauge", "Recorded by prometheus/rules/recording.yml.", labels, "Recording rules")


LIVE = _rule("rank:torchmem_process_state:live", *RANK)
STRANDED_RATIO = _rule("rank:torchmem_stranded_bytes:ratio", *DEVICE)
HEADROOM_RATIO = _rule("rank:torchmem_headroom_bytes:ratio", *DEVICE, "flush")
PEAK_SLACK = _rule("rank:torchmem_peak_slack:ratio", *DEVICE)
RETRIES_10M = _rule("rank:torchmem_alloc_retries:increase10m", *DEVICE)
PART = _rule("gpu:torchmem_memory_bytes:sum", *GPU, "part")
TOTAL = _rule("gpu:torchmem_memory_total_bytes:max", *GPU)


def select(spec: MetricSpec, suffix: str = "", **fixed: str) -> str:
    """A selector of one metric, narrowed by the dashboard's variables and by fixed label values."""
    unknown = set(fixed) - set(spec.labels)
    if unknown:
        raise ValueError(f"{spec.name} has no label {', '.join(sorted(unknown))}")
    matchers = [f'{label}=~"{value}"' for label, value in FILTERS.items() if label in ("instance", *spec.labels)]
    matchers += [f'{label}="{value}"' for label, value in fixed.items()]
    return f"{spec.name}{suffix}{{{', '.join(matchers)}}}"


def live(expression: str) -> str:
    """Only ranks that hold memory now; the exporter serves dead ones with their last values for a while."""
    return f"{expression} and on ({', '.join(PROCESS)}) {LIVE.name}"


def variable_values(label: str, *narrowed_by: str) -> str:
    """Grafana's query for the values of a label of all ranks, narrowed by the variables to its left."""
    matchers = ", ".join(f'{name}=~"{FILTERS[name]}"' for name in narrowed_by)
    selector = f"{{{matchers}}}" if matchers else ""
    return f"label_values({catalog.PROCESS_STATE.name}{selector}, {label})"


def variable_gpus() -> str:
    """Grafana's query for the GPUs that ranks use: value is the UUID, text is node and index."""
    devices = f'{catalog.RESERVED_PEAK.name}{{instance=~"$node", run=~"$run"}}'
    named = f'label_join(max by (instance, gpu, uuid) ({devices}), "where", " GPU ", "instance", "gpu")'
    return f"query_result({named})"


def ranks_by_state() -> str:
    """Number of ranks in each state that any rank is in."""
    return f"sum by (state) ({select(catalog.PROCESS_STATE)}) > 0"


def ooms_in_range() -> str:
    """OutOfMemoryErrors of every process seen in the dashboard's time range."""
    return f"sum(max_over_time({select(catalog.OOMS)}[$__range]))"


def least_headroom() -> str:
    """The rank with the smallest largest-possible allocation."""
    return f"bottomk(1, {live(select(catalog.HEADROOM, flush='true'))})"


def most_stranded() -> str:
    """The rank with the largest share of its device stranded."""
    return f"topk(1, {live(select(STRANDED_RATIO))})"


def worst_fragmentation() -> str:
    """The rank with the highest fragmentation index."""
    return f"topk(1, {live(select(catalog.FRAGMENTATION))})"


def recent_retries() -> str:
    """Allocator retries of all live ranks in the last 10 minutes."""
    return f"sum({live(select(RETRIES_10M))})"


def device_part(part: str) -> str:
    """One part of a device's memory, as the recording rule splits it."""
    return f"sum({select(PART, part=part)})"


def device_total() -> str:
    """Memory of the device."""
    return f"sum({select(TOTAL)})"


def allocated() -> str:
    """Bytes handed out to tensors, per rank."""
    return live(f"sum without (pool) ({select(catalog.ALLOCATED)})")


def reserved() -> str:
    """Bytes held from the driver, per rank."""
    return live(f"sum without (pool) ({select(catalog.RESERVED)})")


def fragmentation() -> str:
    """Fragmentation index, per rank."""
    return live(select(catalog.FRAGMENTATION))


def stranded() -> str:
    """Stranded bytes, per rank."""
    return live(select(catalog.FREE, state="stranded"))


def free_block_sizes() -> str:
    """Free blocks of all live ranks by size."""
    return f"sum by (le) ({live(select(catalog.FREE_BLOCK_SIZE, '_bucket'))})"


def headroom(*, flush: bool) -> str:
    """Largest allocation that would succeed now, without or with the allocator's retry flush, per rank."""
    return live(select(catalog.HEADROOM, flush=str(flush).lower()))


def retries_per_minute() -> str:
    """Allocator retries, per rank."""
    return f"60 * rate({select(catalog.ALLOC_RETRIES)}[$__rate_interval])"


def ooms() -> str:
    """OutOfMemoryErrors since the process started, per rank and cause, where there were any."""
    return f"{select(catalog.OOMS)} > 0"


def mean_step_seconds() -> str:
    """Mean time between two optimizer steps, per rank."""
    seconds, count = (
        f"rate({select(catalog.STEP_DURATION, suffix)}[$__rate_interval])" for suffix in ("_sum", "_count")
    )
    return f"{seconds} / ({count} > 0)"


def slow_step_seconds() -> str:
    """95th percentile of the step duration over all ranks of a run; absent, not NaN, while no step ends."""
    buckets = f"rate({select(catalog.STEP_DURATION, '_bucket')}[$__rate_interval])"
    return f"histogram_quantile(0.95, sum by (run, le) ({buckets})) >= 0"


def peak_slack() -> str:
    """Slack at the peak, per rank."""
    return select(PEAK_SLACK)


def _row(expression: str, *more: str) -> str:
    return f"max by ({', '.join((ROW, *more))}) ({expression})"


def table_state() -> str:
    """State of each process, as a label, on each of its devices."""
    devices = f"{select(catalog.RESERVED_PEAK)} * 0"
    state = f"({select(catalog.PROCESS_STATE)} == 1)"
    return _row(f"{devices} + on ({', '.join(PROCESS)}) group_left (state) {state}", "state")


def table_reserved_peak() -> str:
    """Reserved peak of each process and device."""
    return _row(select(catalog.RESERVED_PEAK))


def table_active_peak() -> str:
    """Active peak of each process and device."""
    return _row(select(catalog.ACTIVE_PEAK))


def table_slack() -> str:
    """Slack at the peak of each process and device."""
    return _row(select(PEAK_SLACK))


def table_stranded() -> str:
    """Stranded bytes of each process and device at its newest snapshot."""
    return _row(select(catalog.FREE, state="stranded"))


def table_oom_time() -> str:
    """Time of the newest OOM in milliseconds, the unit that Grafana's date formats expect."""
    return _row(f"1000 * {select(catalog.LAST_OOM_TIMESTAMP)}")


def table_oom_request() -> str:
    """Bytes that the newest OOM asked for."""
    return _row(select(catalog.LAST_OOM_REQUESTED))


def table_oom_cause() -> str:
    """The most frequent cause of the OOMs of each process and device, as a label."""
    return f"topk by ({ROW}) (1, {_row(f'{select(catalog.OOMS)} > 0', 'cause')})"
