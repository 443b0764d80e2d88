"""What the ranks of a run hold, lack and suffer: the queries of "Training memory"."""

from __future__ import annotations

from dashboards.queries import recorded
from dashboards.queries.select import DEVICE_ROW, PROCESS, RANK_ROW, live, rate, row, select

from torchmem.sample import catalog


def by_state() -> str:
    """Number of ranks in each state that any rank is in."""
    return f"sum by (state) ({select(catalog.PROCESS_STATE)}) > 0"


def ooms_in_range() -> str:
    """OutOfMemoryErrors of every process seen in the dashboard's time range."""
    return f"sum(max_over_time({select(catalog.OOMS, over='$__range')}))"


def least_headroom() -> str:
    """The rank with the smallest largest-possible allocation."""
    return f"bottomk(1, {live(select(catalog.HEADROOM, flush='true'))})"


def soonest_exhaustion() -> str:
    """The rank whose headroom is the first to reach zero, and in how many seconds."""
    return f"bottomk(1, {select(recorded.EXHAUSTION)})"


def most_stranded() -> str:
    """The rank with the largest share of its device stranded."""
    return f"topk(1, {live(select(recorded.STRANDED_RATIO))})"


def worst_fragmentation() -> str:
    """The rank with the highest fragmentation index."""
    return f"topk(1, {live(select(catalog.FRAGMENTATION))})"


def recent_retries() -> str:
    """Allocator retries of all live ranks in the last 10 minutes."""
    return f"sum({live(select(recorded.RETRIES_10M))})"


def part(name: str) -> str:
    """One part of the chosen devices' memory, as the recording rule splits it."""
    return f"sum({select(recorded.PART, part=name)})"


def total() -> str:
    """Memory of the chosen devices."""
    return f"sum({select(recorded.TOTAL)})"


def allocated() -> str:
    """Bytes handed out to tensors, per rank."""
    return live(f"sum without (pool) ({select(catalog.ALLOCATED)})")


def reserved() -> str:
    """Bytes held from the driver, per rank."""
    return live(f"sum without (pool) ({select(catalog.RESERVED)})")


def active_peak() -> str:
    """Highest active bytes since the process started, per rank."""
    return live(select(catalog.ACTIVE_PEAK))


def reserved_peak() -> str:
    """Highest reserved bytes since the process started, per rank."""
    return live(select(catalog.RESERVED_PEAK))


def peak_growth() -> str:
    """Growth of the allocated peak in bytes per hour, per rank."""
    return select(recorded.PEAK_GROWTH)


def imbalance() -> str:
    """Active peak over the mean of the run's other ranks, per rank."""
    return select(recorded.IMBALANCE)


def phase_peak() -> str:
    """Highest allocated bytes within each phase that the script names, per rank."""
    return live(select(catalog.PHASE_PEAK))


def private_pools() -> str:
    """Bytes of CUDA graphs and MemPools, used and free, per rank."""
    return live(select(catalog.PRIVATE_POOL))


def driver_calls_per_minute() -> str:
    """Segments that the allocator takes from the driver, per rank."""
    return f"60 * {rate(select(catalog.DEVICE_ALLOCS))}"


def samples_per_second() -> str:
    """Training samples, as the script reports them, per run."""
    return f"sum by (run) ({rate(select(catalog.SAMPLES))})"


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


def exhaustion() -> str:
    """Seconds until the headroom is used up at its present trend, per rank; absent while it does not fall."""
    return select(recorded.EXHAUSTION)


def retries_per_minute() -> str:
    """Allocator retries, per rank."""
    return f"60 * {rate(select(catalog.ALLOC_RETRIES))}"


def ooms() -> str:
    """OutOfMemoryErrors since the process started, per rank and cause, where there were any."""
    return f"{select(catalog.OOMS)} > 0"


def mean_step_seconds() -> str:
    """Mean time between two optimizer steps, per rank."""
    seconds, count = (rate(select(catalog.STEP_DURATION, suffix)) for suffix in ("_sum", "_count"))
    return f"{seconds} / ({count} > 0)"


def slow_step_seconds() -> str:
    """95th percentile of the step duration over all ranks of a run; absent, not NaN, while no step ends."""
    buckets = rate(select(catalog.STEP_DURATION, "_bucket"))
    return f"histogram_quantile(0.95, sum by (run, le) ({buckets})) >= 0"


def peak_slack() -> str:
    """Slack at the peak, per rank."""
    return select(recorded.PEAK_SLACK)


def oom_moments() -> str:
    """When each rank was out of memory last, in milliseconds since 1970, the unit of Grafana's time axis."""
    return f"1000 * {select(catalog.LAST_OOM_TIMESTAMP)}"


def allocator_settings(*names: str) -> str:
    """Allocator settings of each process, as the labels `names`."""
    return row(RANK_ROW, select(catalog.ALLOCATOR_INFO), *names)


def ignored_settings() -> str:
    """Settings that the allocator did not take over, as a label."""
    return row(RANK_ROW, f"{select(catalog.SETTING_IGNORED)} == 1", "setting")


def table_state() -> str:
    """State of each process, as a label, on each of its devices."""
    devices = f"{select(catalog.RESERVED_PEAK)} * 0"
    state = f"({select(catalog.PROCESS_STATE)} == 1)"
    return row(
        DEVICE_ROW, f"{devices} + on ({', '.join(PROCESS)}) group_left (state) {state}", "state"
    )


def table_active_peak() -> str:
    """Active peak of each process and device."""
    return row(DEVICE_ROW, select(catalog.ACTIVE_PEAK))


def table_reserved_peak() -> str:
    """Reserved peak of each process and device."""
    return row(DEVICE_ROW, select(catalog.RESERVED_PEAK))


def table_slack() -> str:
    """Slack at the peak of each process and device."""
    return row(DEVICE_ROW, select(recorded.PEAK_SLACK))


def table_stranded() -> str:
    """Stranded bytes of each process and device at its newest snapshot."""
    return row(DEVICE_ROW, select(catalog.FREE, state="stranded"))


def table_oom_time() -> str:
    """Time of the newest OOM in milliseconds, the unit that Grafana's date formats expect."""
    return row(DEVICE_ROW, f"1000 * {select(catalog.LAST_OOM_TIMESTAMP)}")


def table_oom_request() -> str:
    """Bytes that the newest OOM asked for."""
    return row(DEVICE_ROW, select(catalog.LAST_OOM_REQUESTED))


def table_oom_cause() -> str:
    """The most frequent cause of the OOMs of each process and device, as a label."""
    return f"topk by ({', '.join(DEVICE_ROW)}) (1, {row(DEVICE_ROW, f'{select(catalog.OOMS)} > 0', 'cause')})"
