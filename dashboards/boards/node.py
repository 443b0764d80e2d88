"""The dashboard "GPU node": what nvidia-smi shows, over time, with processes, users and ranks."""

from __future__ import annotations

from dashboards import recorded
from dashboards.board import LINK_TO_RUN, NODE, NODE_VARIABLES, Board, Mark, Row
from dashboards.colors import ANY_IS_WRONG
from dashboards.panels import (
    GPU,
    PARTS_EXPLAINED,
    Column,
    Panel,
    Query,
    Text,
    Unit,
    joined_table,
    lines,
    memory_stack,
    stat_panel,
    state_timeline,
)
from dashboards.queries import (
    GPU_ROW,
    among,
    append_matcher,
    live,
    rate,
    row,
    select,
)

from torchmem.sample import catalog
from torchmem.sample.catalog import CATALOG, MetricSpec
from torchmem.sample.colors import ATTENTION
from torchmem.sample.xids import XIDS

NO_GPU = "No GPU: NVML is not available"
NO_GPM = "Only data center GPUs from Hopper on report this"
NO_NVLINK = "This GPU has no NVLink"
NO_PROCESS = "No process uses a GPU here"

PROCESS_ROW = (*GPU_ROW, "pid")
XID_ROW = (*GPU_ROW, "xid")
MIG_ROW = (*GPU_ROW, "gpu_instance")
PROCESS_FACTS = ("name", "user", "run", "rank", "slurm_job_id", "pod_uid")

# NVML GPM metrics by the unit of the GPU that they measure.
GPU_UNITS = {
    "sm_active_ratio": "SMs busy",
    "sm_occupancy_ratio": "SM occupancy",
    "tensor_active_ratio": "Tensor cores",
    "dram_active_ratio": "Memory bus",
}


def _spec(name: str) -> MetricSpec:
    return CATALOG[f"nvml_{name}"]


def _value(name: str, **fixed: str) -> str:
    """Return the metric nvml_`name` of every GPU."""
    return select(_spec(name), **fixed)


def _per_minute(name: str) -> str:
    return f"60 * {rate(_value(name))}"


def _gpu_value(name: str, *more: str, **fixed: str) -> str:
    """Return a value of every GPU for a table; the labels `more` become columns."""
    return row(GPU_ROW, _value(name, **fixed), *more)


_XIDS = f"round(increase({select(_spec('xid_errors_total'), over='$__range')}))"
_DRIVERS = f"count by (driver_version, cuda_version) ({_value('driver_info')})"
NUMBERS: list[Panel] = [
    stat_panel(
        Text("GPUs", "How many GPUs does the driver reach?", NO_GPU),
        Query(f"sum({select(catalog.NVML_GPU_UP)})"),
        Unit.COUNT,
    ),
    stat_panel(
        Text(
            "GPUs lost",
            "How many GPUs stopped responding? In the table, they have a name but no values. A "
            "lost GPU usually needs a reset or a reboot.",
            NO_GPU,
        ),
        Query(f"count({select(catalog.NVML_GPU_UP)} == 0) or vector(0)"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "XID errors in range",
            "How many errors did the driver report in the selected time range? The row Errors "
            "lists and explains them.",
            NO_GPU,
        ),
        Query(f"sum({_XIDS}) or vector(0)"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text("Total power", "How much power do the selected GPUs draw together?", NO_GPU),
        Query(f"sum({_value('power_watts')})"),
        Unit.WATTS,
    ),
    stat_panel(
        Text(
            "Driver",
            "Which versions of the driver and CUDA are installed, on how many nodes? More than "
            "one version may be an incomplete upgrade.",
            NO_GPU,
        ),
        Query(_DRIVERS, "driver {{driver_version}}, CUDA {{cuda_version}}"),
        Unit.COUNT,
    ).span(8),
]


def _gpus() -> Panel:
    text = Text(
        "GPU table",
        "What would nvidia-smi show now? Uncorrected: memory errors since the driver was loaded "
        "that ECC could not correct. State: P0 is full speed, P8 is idle.",
        NO_GPU,
    )
    facts = _gpu_value("gpu_info", "name", "pci_bus_id")
    uncorrected = _gpu_value("ecc_errors_total", kind="uncorrected", scope="volatile")
    busy = _gpu_value("utilization_ratio", engine="gpu")
    temperature = _gpu_value("temperature_celsius", sensor="gpu")
    memory_share = f"{_gpu_value('memory_used_bytes')} / {_gpu_value('memory_total_bytes')}"
    columns = [
        Column("Node", label="instance"),
        Column("GPU", label="gpu", width=60),
        Column("Name", facts, label="name"),
        Column("Bus id", facts, label="pci_bus_id"),
        Column("Fan", _gpu_value("fan_speed_ratio"), unit=Unit.RATIO),
        Column("Temperature", temperature, unit=Unit.CELSIUS),
        Column("State", _gpu_value("performance_state")),
        Column("Power", _gpu_value("power_watts"), unit=Unit.WATTS),
        Column("Limit", _gpu_value("power_limit_watts"), unit=Unit.WATTS),
        Column("Memory used", _gpu_value("memory_used_bytes"), unit=Unit.BYTES),
        Column("Memory", _gpu_value("memory_total_bytes"), unit=Unit.BYTES),
        Column("Used", memory_share, unit=Unit.RATIO, bar=True),
        Column("Busy", busy, unit=Unit.RATIO, bar=True),
        Column("Processes", _gpu_value("processes")),
        Column("Uncorrected", uncorrected),
        Column("MIG", _gpu_value("mig_enabled"), names={"0": "off", "1": "on"}),
    ]
    return joined_table(text, columns)


def _of_any_rank(spec: MetricSpec) -> str:
    """Return a metric of live ranks, filtered by node and GPU: run and rank are hidden here."""
    return live(f'{spec.name}{{instance=~"$node", uuid=~"$gpu"}}')


def _processes() -> Panel:
    text = Text(
        "Processes",
        "Which processes hold the memory? The table lists every process on every GPU, whether it "
        "uses PyTorch or not. Run and rank are known for processes with torchmem's SDK. PyTorch is "
        "what the allocator holds; outside is what the process holds in addition: CUDA context, "
        "NCCL, other libraries. Names are known if the exporter can see the host's processes. The "
        "pid other stands for all processes beyond the largest ones.",
        NO_PROCESS,
    )
    facts = row(PROCESS_ROW, _value("process_info"), *PROCESS_FACTS)
    memory = row(PROCESS_ROW, select(catalog.NVML_PROCESS_MEMORY))
    reserved = f"sum by ({', '.join(PROCESS_ROW)}) ({_of_any_rank(catalog.RESERVED)})"
    outside = row(PROCESS_ROW, _of_any_rank(catalog.OUTSIDE_ALLOCATOR))
    busy = row(PROCESS_ROW, _value("process_utilization_ratio", engine="sm"))
    columns = [
        Column("Node", label="instance"),
        Column("GPU", label="gpu", width=60),
        Column("Pid", label="pid", width=90),
        Column("Name", facts, label="name"),
        Column("User", facts, label="user"),
        Column("Run", facts, label="run", link=LINK_TO_RUN),
        Column("Rank", facts, label="rank", width=60),
        Column("Slurm job", facts, label="slurm_job_id"),
        Column("Pod", facts, label="pod_uid"),
        Column("Memory", memory, unit=Unit.BYTES),
        Column("PyTorch", reserved, unit=Unit.BYTES),
        Column("Outside", outside, unit=Unit.BYTES),
        Column("Busy", busy, unit=Unit.RATIO, bar=True),
    ]
    return joined_table(text, columns, sort="Memory", descending=True)


MEMORY: list[Panel] = [
    memory_stack(
        Text(
            "Memory of the selected GPUs",
            f"What is the memory used for? {PARTS_EXPLAINED}",
            NO_GPU,
        ),
        lambda part: f"sum({select(recorded.PART, part=part)})",
        Query(f"sum({select(recorded.TOTAL)})", "Total"),
    ),
    lines(
        Text(
            "Used memory",
            "How full is each GPU? The value is the driver's, for all processes together.",
            NO_GPU,
        ),
        [Query(_value("memory_used_bytes"), GPU)],
        Unit.BYTES,
    ),
    lines(
        Text(
            "Memory by process",
            "Which process's memory grew, and when? All processes on the selected GPUs are shown.",
            NO_PROCESS,
        ),
        [Query(_value("process_memory_bytes"), f"{GPU} pid {{{{pid}}}}")],
        Unit.BYTES,
    ),
    lines(
        Text(
            "Unattributed memory",
            "How much used memory belongs to no visible process? The driver uses some. More "
            "than that may be a process in another container, or a leak after a crash.",
            "None, or the driver does not report the memory of processes",
        ),
        [Query(_value("unattributed_memory_bytes"), GPU)],
        Unit.BYTES,
    ),
    lines(
        Text(
            "BAR1 used",
            "How full is BAR1, the window through which the host and other devices access GPU "
            "memory? If it is full, GPUDirect and peer access fail although memory is free.",
            "This driver does not report BAR1",
        ),
        [
            Query(_value("bar1_used_bytes"), GPU),
            Query(_value("bar1_total_bytes"), f"{GPU}, size", "text"),
        ],
        Unit.BYTES,
    ),
]

UTILIZATION: list[Panel] = [
    lines(
        Text(
            "GPU utilization",
            "Is each GPU busy? The share of time in which at least one kernel ran. 100 % does "
            "not mean that the kernel used the whole GPU.",
            NO_GPU,
        ),
        [Query(_value("utilization_ratio", engine="gpu"), GPU)],
        Unit.RATIO,
    ).max(1),
    lines(
        Text(
            "Memory utilization",
            "Is memory read or written? The share of time in which it was. If it is high while "
            "the tensor cores are mostly idle, the job is limited by memory bandwidth.",
            NO_GPU,
        ),
        [Query(_value("utilization_ratio", engine="memory"), GPU)],
        Unit.RATIO,
    ).max(1),
    lines(
        Text(
            "GPU units",
            "How well is the hardware used? The share of time, or of warp slots, by unit. "
            "Matrix operations that do not use the tensor cores run in 32-bit precision.",
            NO_GPM,
        ),
        [Query(_value(name), f"{GPU}: {unit}") for name, unit in GPU_UNITS.items()],
        Unit.RATIO,
    ).max(1),
    lines(
        Text(
            "Video and image engines",
            "Do decoders or encoders limit a data pipeline?",
            "This GPU has none",
        ),
        [
            Query(_value("utilization_ratio", engine=engine), f"{GPU}: {engine}")
            for engine in ("encoder", "decoder", "jpeg", "ofa")
        ],
        Unit.RATIO,
    ).max(1),
]


def _throttle_reasons() -> str:
    """Return 1 while a reason to throttle applied, for reasons that applied within the range.

    Idling and configured clocks are not throttling.
    """
    now, ever = (
        append_matcher(
            select(_spec("throttle_active"), over=over),
            'reason!~"gpu_idle|applications_clocks_setting"',
        )
        for over in ("", "$__range")
    )
    labels = ("instance", "gpu", "reason")
    return among(
        labels, row(labels, now), f"({row(labels, f'max_over_time({ever} @ end())')} == 1)"
    )


_SLOWDOWN = _value("temperature_threshold_celsius", threshold="slowdown")
POWER_AND_CLOCKS: list[Panel] = [
    lines(
        Text(
            "Power",
            "How much power does each GPU draw, what is its limit, and what is the highest limit "
            "that can be set? Near the limit, the GPU slows down.",
            NO_GPU,
        ),
        [
            Query(_value("power_watts"), GPU),
            Query(_value("power_limit_watts"), f"{GPU}, limit", "text"),
            Query(_value("power_limit_max_watts"), f"{GPU}, highest limit", "text"),
        ],
        Unit.WATTS,
    ),
    lines(
        Text(
            "Temperature",
            "How hot is each GPU, by sensor? At the slowdown threshold, the GPU lowers its "
            "clocks to protect itself.",
            NO_GPU,
        ),
        [
            Query(_value("temperature_celsius"), f"{GPU}, {{{{sensor}}}}"),
            Query(_SLOWDOWN, f"{GPU}, slowdown", "text"),
        ],
        Unit.CELSIUS,
    ),
    state_timeline(
        Text(
            "Throttled",
            "Is a GPU slower than it could be, and why? sw_power_cap: it is at its power "
            "limit. hw_thermal_slowdown and sw_thermal_slowdown: it is too hot. "
            "hw_power_brake_slowdown: the server's power supply requests it. Power caps are "
            "usual under load; thermal slowdowns point to the cooling.",
            "No GPU was throttled in this time range",
        ),
        Query(_throttle_reasons(), f"{GPU}: {{{{reason}}}}"),
        {0: ("no", "transparent"), 1: ("yes", ATTENTION)},
    ),
    lines(
        Text(
            "Clocks",
            "How fast does each GPU run, and how fast could it? The SM clock determines "
            "arithmetic, the memory clock bandwidth.",
            NO_GPU,
        ),
        [
            Query(_value("clock_hertz", domain="sm"), f"{GPU}, SM"),
            Query(_value("clock_hertz", domain="memory"), f"{GPU}, memory"),
            Query(_value("clock_max_hertz", domain="sm"), f"{GPU}, SM, highest", "text"),
        ],
        Unit.HERTZ,
    ).span(24),
]


def _xids() -> Panel:
    text = Text(
        "XID errors",
        "Which errors did the driver report, and what do they mean? They are counted since the "
        "exporter started, and include errors of programs.",
        "No XID error since the exporter started",
    )
    counts = f"{row(XID_ROW, _value('xid_errors_total'))} > 0"
    times = row(XID_ROW, f"1000 * {_value('xid_last_timestamp_seconds')}")
    columns = [
        Column("Node", label="instance"),
        Column("GPU", label="gpu"),
        Column(
            "XID", label="xid", names={str(number): xid.summary for number, xid in XIDS.items()}
        ),
        Column("Times", counts),
        Column("Newest", times, unit=Unit.AGO),
    ]
    return joined_table(text, columns, sort="Newest", descending=True).height(7)


HARDWARE_ERRORS: list[Panel] = [
    lines(
        Text(
            "Memory errors (ECC)",
            "Is the memory failing? Errors are counted since the driver was loaded. Corrected "
            "errors have no effect; an uncorrected error ends the affected program.",
            "This GPU has no ECC",
        ),
        [Query(_value("ecc_errors_total", scope="volatile"), f"{GPU}, {{{{kind}}}}")],
        Unit.COUNT,
    ),
    lines(
        Text(
            "Remapped rows and retired pages",
            "How much memory has been replaced permanently? GPUs from Ampere on remap rows, "
            "older ones retire pages. A pending replacement takes effect after a reset.",
            "This GPU does not replace memory",
        ),
        [
            Query(_value("remapped_rows"), f"{GPU}, rows {{{{kind}}}}"),
            Query(_value("row_remap_pending"), f"{GPU}, rows pending"),
            Query(_value("row_remap_failed"), f"{GPU}, rows failed"),
            Query(_value("retired_pages"), f"{GPU}, pages {{{{cause}}}}"),
            Query(_value("retired_pages_pending"), f"{GPU}, pages pending"),
        ],
        Unit.COUNT,
    ),
    lines(
        Text(
            "NVLink errors per minute",
            "Is a link between GPUs faulty? Replays and recoveries slow down collectives. The "
            "panel adds up all links of a GPU; `nvidia-smi nvlink -e` on the node shows each "
            "link.",
            NO_NVLINK,
        ),
        [Query(_per_minute("nvlink_errors_total"), f"{GPU}, {{{{kind}}}}")],
        Unit.COUNT,
    ),
    lines(
        Text(
            "PCIe replays per minute",
            "Is the connection to the host faulty? Replays are packets that were sent again. A "
            "few are harmless; a constant rate points to a bad slot, riser or cable.",
            "This GPU does not report PCIe replays",
        ),
        [Query(_per_minute("pcie_replays_total"), GPU)],
        Unit.COUNT,
    ),
]


def _pcie_links() -> Panel:
    text = Text(
        "PCIe links",
        "Does each GPU use its full PCIe link? Fewer lanes than the maximum point to the seating "
        "or the slot. A lower generation while the GPU is idle saves power and is normal.",
        NO_GPU,
    )
    columns = [
        Column("Node", label="instance"),
        Column("GPU", label="gpu"),
        Column("Generation", _gpu_value("pcie_link_generation")),
        Column("Max generation", _gpu_value("pcie_link_max_generation")),
        Column("Lanes", _gpu_value("pcie_link_width")),
        Column("Max lanes", _gpu_value("pcie_link_max_width")),
    ]
    return joined_table(text, columns).span(12)


_NVLINK = rate(_value("nvlink_bytes_total"))
LINKS: list[Panel] = [
    _pcie_links(),
    lines(
        Text(
            "PCIe traffic",
            "How much data moves between host and GPU? rx is traffic to the GPU. Copies of "
            "pageable memory by a data loader, and offloading, show up here. The traffic comes "
            "from GPM, or from NVML if that is enabled in the exporter's configuration.",
            "Not read: enable it in the exporter's configuration",
        ),
        [
            Query(_value("pcie_throughput_bytes_per_second"), f"{GPU}, {{{{direction}}}}"),
            Query(_value("gpm_pcie_bytes_per_second"), f"{GPU}, {{{{direction}}}} (GPM)"),
        ],
        Unit.BYTES_PER_SECOND,
    ).height(9),
    lines(
        Text(
            "NVLink traffic",
            "How much data moves between GPUs? Collectives of data parallel and tensor "
            "parallel training show up here.",
            NO_NVLINK,
        ),
        [
            Query(_NVLINK, f"{GPU}, {{{{direction}}}}"),
            Query(_value("gpm_nvlink_bytes_per_second"), f"{GPU}, {{{{direction}}}} (GPM)"),
        ],
        Unit.BYTES_PER_SECOND,
    ),
    lines(
        Text(
            "NVLinks up",
            "How many links of each GPU are up? All GPUs of the same kind have the same "
            "number. A GPU with fewer links slows down the whole ring.",
            NO_NVLINK,
        ),
        [Query(f"sum by ({', '.join(GPU_ROW)}) ({_value('nvlink_up')})", GPU)],
        Unit.COUNT,
    ),
]


def _mig() -> Panel:
    text = Text(
        "MIG instances",
        "How full is each MIG instance? Memory belongs to the GPU instance; its compute instances "
        "share it. Driver is what the driver reserves for itself.",
        "No GPU is in MIG mode",
    )

    def memory(name: str) -> str:
        return row(MIG_ROW, _value(f"mig_memory_{name}_bytes"))

    columns = [
        Column("Node", label="instance"),
        Column("GPU", label="gpu"),
        Column("Instance", label="gpu_instance"),
        Column("Profile", row(MIG_ROW, _value("mig_info"), "profile"), label="profile"),
        Column("Used", memory("used"), unit=Unit.BYTES),
        Column("Free", memory("free"), unit=Unit.BYTES),
        Column("Driver", memory("reserved"), unit=Unit.BYTES),
        Column("Memory", memory("total"), unit=Unit.BYTES),
    ]
    return joined_table(text, columns).height(7)


XID_MARK = Mark(
    "XID",
    f"1000 * {_value('xid_last_timestamp_seconds')}",
    "XID {{xid}} on {{instance}} GPU {{gpu}}",
    "red",
)

BOARD = Board(
    NODE,
    "GPU node",
    "The GPUs of a node as the driver reports them: memory and the processes that hold it, "
    "utilization, power and temperature, errors, links, MIG.",
    NODE_VARIABLES,
    (
        Row("Overview", [*NUMBERS, _gpus()]),
        Row("Memory and processes", [_processes(), *MEMORY]),
        Row("Utilization", UTILIZATION),
        Row("Power, temperature and clocks", POWER_AND_CLOCKS),
        Row("Errors", [_xids(), *HARDWARE_ERRORS]),
        Row("PCIe and NVLink", LINKS),
        Row("MIG", [_mig()]),
    ),
    (XID_MARK,),
)
