"""What the driver says of the GPUs of a node: the queries of "GPU node"."""

from __future__ import annotations

from dashboards.queries import recorded
from dashboards.queries.select import GPU_ROW, among, live, rate, row, select

from torchmem.sample import catalog
from torchmem.sample.catalog import CATALOG, MetricSpec

PROCESS_ROW = (*GPU_ROW, "pid")
WHO = ("name", "user", "run", "rank", "slurm_job_id", "pod_uid")


def nvml(name: str) -> MetricSpec:
    """The metric nvml_`name`."""
    return CATALOG[f"nvml_{name}"]


def value(name: str, **fixed: str) -> str:
    """A value of every GPU."""
    return select(nvml(name), **fixed)


def per_second(name: str) -> str:
    """A counter's growth, per second."""
    return rate(value(name))


def per_minute(name: str) -> str:
    """A counter's growth, per minute."""
    return f"60 * {per_second(name)}"


def increased(name: str) -> str:
    """By how much a counter grew within the dashboard's time range, in whole numbers."""
    return f"round(increase({select(nvml(name), over='$__range')}))"


def column(name: str, *more: str, **fixed: str) -> str:
    """A value of every GPU, as a column of the table of GPUs; labels in `more` become columns too."""
    return row(GPU_ROW, value(name, **fixed), *more)


def memory_share() -> str:
    """Used share of the memory that programs can have."""
    return f"{column('memory_used_bytes')} / {column('memory_total_bytes')}"


def answering() -> str:
    """GPUs that answer."""
    return f"sum({select(catalog.NVML_GPU_UP)})"


def lost() -> str:
    """GPUs that do not."""
    return f"count({select(catalog.NVML_GPU_UP)} == 0) or vector(0)"


def power() -> str:
    """Power of all chosen GPUs."""
    return f"sum({value('power_watts')})"


def xids() -> str:
    """XID errors within the dashboard's time range."""
    return f"sum({increased('xid_errors_total')}) or vector(0)"


def drivers() -> str:
    """Nodes with each version of the driver and CUDA."""
    return f"count by (driver_version, cuda_version) ({value('driver_info')})"


def processes() -> str:
    """Memory of each process."""
    return row(PROCESS_ROW, select(catalog.NVML_PROCESS_MEMORY))


def process_facts() -> str:
    """Name, user, run and rank of each process, as labels."""
    return row(PROCESS_ROW, value("process_info"), *WHO)


def process_reserved() -> str:
    """What PyTorch's allocator holds, per process."""
    return f"sum by ({', '.join(PROCESS_ROW)}) ({_any_rank(catalog.RESERVED)})"


def process_outside() -> str:
    """What a PyTorch process holds outside its allocator."""
    return row(PROCESS_ROW, _any_rank(catalog.OUTSIDE_ALLOCATOR))


def process_utilization() -> str:
    """Share of time in which a kernel of the process ran."""
    return row(PROCESS_ROW, value("process_utilization_ratio", engine="sm"))


def _any_rank(spec: MetricSpec) -> str:
    """Of ranks that live; narrowed by node and GPU alone, for here the choices of run and rank are hidden."""
    return live(f'{spec.name}{{instance=~"$node", uuid=~"$gpu"}}')


def xid_times() -> str:
    """When each XID was seen last, in milliseconds since 1970."""
    return row((*GPU_ROW, "xid"), f"1000 * {value('xid_last_timestamp_seconds')}")


def xid_counts() -> str:
    """How often each XID was seen since the exporter started."""
    return f"{row((*GPU_ROW, 'xid'), value('xid_errors_total'))} > 0"


def xid_moments() -> str:
    """When each XID was seen last, in milliseconds since 1970, the unit of Grafana's time axis."""
    return f"1000 * {value('xid_last_timestamp_seconds')}"


def throttled() -> str:
    """Reasons why a GPU ran slower than it could: 1 while the reason held. Idling and set clocks are none.

    Only reasons that held at some moment of the dashboard's time range.
    """
    now, ever = (
        select(nvml("throttle_active"), over=over).replace(
            "}", ', reason!~"gpu_idle|applications_clocks_setting"}'
        )
        for over in ("", "$__range")
    )
    labels = ("instance", "gpu", "reason")
    return among(
        labels, row(labels, now), f"({row(labels, f'max_over_time({ever} @ end())')} == 1)"
    )


def mig(name: str) -> str:
    """Memory of each MIG instance."""
    return row((*GPU_ROW, "gpu_instance"), value(f"mig_memory_{name}_bytes"))


def mig_facts() -> str:
    """Profile of each MIG instance, as a label."""
    return row((*GPU_ROW, "gpu_instance"), value("mig_info"), "profile")


def part(name: str) -> str:
    """One part of the chosen GPUs' memory."""
    return f"sum({select(recorded.PART, part=name)})"


def total() -> str:
    """Memory of the chosen GPUs."""
    return f"sum({select(recorded.TOTAL)})"


def links_up() -> str:
    """Number of NVLinks that work, per GPU."""
    return f"sum by ({', '.join(GPU_ROW)}) ({value('nvlink_up')})"
