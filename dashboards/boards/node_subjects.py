"""The rows of the dashboard "GPU node" that are opened on demand, by subject."""

from __future__ import annotations

from dashboards import recorded
from dashboards.colors import GPU_TEMPERATURE, MEMORY_USED
from dashboards.gpus import (
    NAME,
    NO_GPU,
    THROTTLING,
    XID_COLORS,
    XID_ROW,
    gpu_lines,
    gpu_value,
    throttling,
    value,
)
from dashboards.panels import (
    PARTS_EXPLAINED,
    Column,
    Panel,
    Query,
    Unit,
    joined_table,
    lines,
    memory_stack,
    state_timeline,
    with_limit,
)
from dashboards.queries import GPU_NAMES, GPU_ROW, among, append_matcher, named, rate, row, select

from torchmem.sample.xids import XIDS

NO_GPM = "Only data center GPUs from Hopper on report this"
NO_CLOCKS = "No GPU reports its clocks"
NO_NVLINK = "No NVLink on these GPUs"
MIG_ROW = (*GPU_ROW, "gpu_instance")
GPU_NAME = Column("GPU", row(GPU_ROW, GPU_NAMES, "short_name"), label="short_name", width=170)

# NVML GPM metrics by the unit of the GPU that they measure.
GPU_UNITS = {
    "sm_active_ratio": ("SMs busy", "Is each GPU's arithmetic used? The share of SMs at work."),
    "tensor_active_ratio": (
        "Tensor cores",
        "Are the tensor cores used? Matrix operations in 32-bit precision do not use them.",
    ),
    "dram_active_ratio": (
        "Memory bus",
        "Does memory bandwidth limit the job? The share of the bandwidth in use.",
    ),
    "sm_occupancy_ratio": (
        "SM occupancy",
        "How many of the warps that fit are resident? Low values are normal for large kernels.",
    ),
}


def _lines(title: str, query: Query | list[Query], unit: str) -> Panel:
    """Return lines as high as those of `gpu_lines`."""
    return lines(title, query, unit).height(9)


def _named(expression: str, legend: str, labels: tuple[str, ...] = ()) -> Query:
    """Return a query for one line per GPU and value of `labels`."""
    return Query(named(row((*GPU_ROW, *labels), expression)), f"{NAME}{legend}")


OVER_TIME: list[Panel] = [
    gpu_lines("GPU utilization", value("utilization_ratio", engine="gpu"), Unit.RATIO, lowest=True)
    .description(
        "Is each GPU busy? The share of time in which at least one kernel ran. 100% does "
        "not mean that the kernel used the whole GPU."
    )
    .max(1),
    gpu_lines(
        "Used memory", f"{value('memory_used_bytes')} / {value('memory_total_bytes')}", Unit.RATIO
    )
    .description("How full is each GPU? The value is the driver's, for all processes together.")
    .max(1),
    gpu_lines(
        "Temperature",
        value("temperature_celsius", sensor="gpu"),
        Unit.CELSIUS,
        mark=GPU_TEMPERATURE,
    )
    .description(
        "How hot is each GPU? From the first dashed line on, many GPUs lower their clocks."
    )
    .height(10),
    with_limit(
        gpu_lines("Power by GPU", value("power_watts"), Unit.WATTS).description(
            "How much power does each GPU draw, and what is the highest limit in effect, "
            "the dashed line? At its limit, a GPU lowers its clocks."
        ),
        Query(f"max({value('power_limit_watts')})", "highest limit"),
    ).height(10),
]

MEMORY: list[Panel] = [
    memory_stack(
        "Memory of the selected GPUs",
        lambda part: f"sum({select(recorded.PART, part=part)})",
        Query(f"sum({select(recorded.TOTAL)})", "Total"),
    )
    .description(f"What is the memory used for? {PARTS_EXPLAINED}")
    .no_value(NO_GPU),
    _lines(
        "Memory by process",
        _named(
            f"{value('process_memory_bytes')} and on (instance, uuid, pid) topk(10, "
            f"max_over_time({value('process_memory_bytes', '$__range')} @ end()))",
            " pid {{pid}}",
            ("pid",),
        ),
        Unit.BYTES,
    )
    .description("Which process's memory grew, and when? The largest processes of the time range.")
    .no_value("No process uses a GPU here")
    .span(14),
    gpu_lines("Unattributed memory", value("unattributed_memory_bytes"), Unit.BYTES)
    .description(
        "How much used memory belongs to no visible process? The driver uses some. More "
        "than that may be a process in another container, or a leak after a crash."
    )
    .no_value("None, or the driver does not report the memory of processes")
    .span(10),
]

UTILIZATION: list[Panel] = [
    *(
        gpu_lines(title, value(name), Unit.RATIO, lowest=True)
        .description(question)
        .no_value(NO_GPM)
        .max(1)
        for name, (title, question) in GPU_UNITS.items()
    ),
    gpu_lines("Memory utilization", value("utilization_ratio", engine="memory"), Unit.RATIO)
    .description(
        "Is memory read or written? The share of time in which it was. If it is high while "
        "the tensor cores are mostly idle, the job is limited by memory bandwidth."
    )
    .max(1),
    _lines(
        "Video and image engines",
        _named(
            append_matcher(value("utilization_ratio"), 'engine!~"gpu|memory"') + " > 0",
            " {{engine}}",
            ("engine",),
        ),
        Unit.RATIO,
    )
    .description("Do decoders or encoders limit a data pipeline?")
    .no_value("Not in use"),
]

POWER_AND_CLOCKS: list[Panel] = [
    state_timeline(
        "Throttled by",
        Query(named(throttling()), NAME),
        {int(code): word for code, word in THROTTLING.items()},
    )
    .description(
        "Is a GPU slower than it could be, and why? Power cap: it is at its power limit, "
        "which is usual under load. Heat: it is too hot, which points to the cooling. Power "
        "supply: the server asks it to draw less."
    )
    .no_value("No GPU reports why it is slowed down"),
    gpu_lines(
        "SM clock",
        f"{value('clock_hertz', domain='sm')} / {value('clock_max_hertz', domain='sm')}",
        Unit.RATIO,
        lowest=True,
    )
    .description("How fast does each GPU compute, as a share of its highest clock?")
    .no_value(NO_CLOCKS)
    .max(1),
    gpu_lines("Memory clock", value("clock_hertz", domain="memory"), Unit.HERTZ, lowest=True)
    .description("How fast is each GPU's memory? It determines the bandwidth.")
    .no_value(NO_CLOCKS),
    gpu_lines(
        "Below the slowdown temperature",
        f"{row(GPU_ROW, value('temperature_threshold_celsius', threshold='slowdown'))} - "
        f"{row(GPU_ROW, value('temperature_celsius', sensor='gpu'))}",
        Unit.CELSIUS,
        lowest=True,
    )
    .description("How many degrees are left until each GPU lowers its clocks to protect itself?")
    .no_value("These GPUs do not report the temperature at which they slow down"),
    gpu_lines("Memory temperature", value("temperature_celsius", sensor="memory"), Unit.CELSIUS)
    .description(
        "How hot is the memory of each GPU? HBM is warmer than the GPU, and limited as well."
    )
    .no_value("These GPUs do not report the temperature of their memory"),
]


def _xids() -> Panel:
    counts = f"{row(XID_ROW, value('xid_errors_total'))} > 0"
    times = row(XID_ROW, f"1000 * {value('xid_last_timestamp_seconds')}")
    columns = [
        Column("Node", label="instance", width=200),
        Column("GPU", label="gpu", width=60),
        Column(
            "XID",
            label="xid",
            names={str(number): xid.summary for number, xid in XIDS.items()},
            colors=XID_COLORS,
        ),
        Column("Times", counts, width=80),
        Column("Newest", times, unit=Unit.AGO, width=140),
    ]
    table = joined_table("XID errors by code", columns, sort="Newest", descending=True)
    table.description(
        "Which errors did the driver report, and what do they mean? They are counted since the "
        "exporter started, and include errors of programs."
    ).no_value("No XID error since the exporter started")
    return table.height(7)


def _per_minute(name: str) -> str:
    return f"60 * {rate(value(name))}"


ERRORS: list[Panel] = [
    _xids(),
    _lines(
        "Memory errors (ECC)",
        _named(f"{value('ecc_errors_total', scope='volatile')} > 0", " {{kind}}", ("kind",)),
        Unit.COUNT,
    )
    .description(
        "Is the memory failing? Errors are counted since the driver was loaded. Corrected "
        "errors have no effect; an uncorrected error ends the affected program."
    )
    .no_value("These GPUs have no ECC"),
    _lines(
        "NVLink errors per minute",
        _named(f"{_per_minute('nvlink_errors_total')} > 0", " {{kind}}", ("kind",)),
        Unit.PER_MINUTE,
    )
    .description(
        "Is a link between GPUs faulty? Replays and recoveries slow down collectives. The panel "
        "adds up all links of a GPU; `nvidia-smi nvlink -e` on the node shows each link."
    )
    .no_value("No NVLink error"),
    _lines(
        "Remapped rows and retired pages",
        [
            _named(f"{value('remapped_rows')} > 0", " {{kind}}", ("kind",)),
            _named(f"{value('row_remap_pending')} > 0", " to be remapped"),
            _named(f"{value('row_remap_failed')} > 0", " not remapped"),
            _named(f"{value('retired_pages')} > 0", " {{cause}}", ("cause",)),
            _named(f"{value('retired_pages_pending')} > 0", " to be retired"),
        ],
        Unit.COUNT,
    )
    .description(
        "How much memory has been replaced permanently? GPUs from Ampere on remap rows, "
        "older ones retire pages. A pending replacement takes effect after a reset."
    )
    .no_value("No memory was replaced")
    .span(14),
    _lines(
        "PCIe replays per minute",
        _named(f"{_per_minute('pcie_replays_total')} > 0", ""),
        Unit.PER_MINUTE,
    )
    .description(
        "Is the connection to the host faulty? Replays are packets that were sent again. A "
        "few are harmless; a constant rate points to a bad slot, riser or cable."
    )
    .no_value("No PCIe replay")
    .span(10),
]


PCIE_DIRECTIONS = {
    "rx": (
        "to the GPU",
        "How much does each GPU read from the host? Batches and offloading show up here.",
    ),
    "tx": ("from the GPU", "How much does each GPU write to the host?"),
}
PCIE_SOURCE = "From GPM, or from NVML if the exporter's configuration enables that."
NO_PCIE_TRAFFIC = "Not read: enable it in the exporter's configuration"


def _pcie_links() -> Panel:
    columns = [
        GPU_NAME,
        Column("Generation", gpu_value("pcie_link_generation")),
        Column("Highest", gpu_value("pcie_link_max_generation")),
        Column("Lanes", gpu_value("pcie_link_width")),
        Column("Most lanes", gpu_value("pcie_link_max_width")),
    ]
    table = joined_table("PCIe links", columns, sort="GPU", hidden=GPU_ROW)
    table.description(
        "Does each GPU use its full PCIe link? Fewer lanes than the maximum point to the seating "
        "or the slot. A lower generation while the GPU is idle saves power and is normal."
    ).no_value(NO_GPU)
    return table.span(12).min_width(60)


def _of_both_directions(expression: str) -> str:
    return f"sum without (direction) ({expression})"


LINKS: list[Panel] = [
    _pcie_links(),
    gpu_lines("BAR1 used", f"{value('bar1_used_bytes')} / {value('bar1_total_bytes')}", Unit.RATIO)
    .description(
        "How full is BAR1, the window through which the host and other devices access GPU "
        "memory? If it is full, GPUDirect and peer access fail although memory is free."
    )
    .no_value("This driver does not report BAR1")
    .max(1),
    *(
        gpu_lines(
            f"PCIe traffic {title}",
            f"{value('gpm_pcie_bytes_per_second', direction=direction)} or "
            f"{value('pcie_throughput_bytes_per_second', direction=direction)}",
            Unit.BYTES_PER_SECOND,
        )
        .description(f"{question} {PCIE_SOURCE}")
        .no_value(NO_PCIE_TRAFFIC)
        for direction, (title, question) in PCIE_DIRECTIONS.items()
    ),
    gpu_lines(
        "NVLink traffic",
        f"{_of_both_directions(rate(value('nvlink_bytes_total')))} or "
        f"{_of_both_directions(value('gpm_nvlink_bytes_per_second'))}",
        Unit.BYTES_PER_SECOND,
    )
    .description(
        "How much data moves between GPUs, in both directions? Collectives of data parallel "
        "and tensor parallel training show up here."
    )
    .no_value(NO_NVLINK),
    gpu_lines(
        "NVLinks up",
        f"sum by ({', '.join(GPU_ROW)}) ({value('nvlink_up')})",
        Unit.COUNT,
        lowest=True,
    )
    .description(
        "How many links of each GPU are up? All GPUs of the same kind have the same "
        "number. A GPU with fewer links slows down the whole ring."
    )
    .no_value(NO_NVLINK),
]


def _mig() -> Panel:

    def memory(name: str) -> str:
        return row(MIG_ROW, value(f"mig_memory_{name}_bytes"))

    columns = [
        Column("GPU", row((*MIG_ROW, "short_name"), named(memory("total"))), label="short_name"),
        Column("Instance", label="gpu_instance", width=80),
        Column("Profile", row(MIG_ROW, value("mig_info"), "profile"), label="profile", width=90),
        Column(
            "Memory",
            f"{memory('used')} / {memory('total')}",
            unit=Unit.RATIO,
            bar=True,
            levels=MEMORY_USED,
        ),
        Column("Used", memory("used"), unit=Unit.BYTES),
        Column("Free", memory("free"), unit=Unit.BYTES),
        Column("Driver", memory("reserved"), unit=Unit.BYTES),
    ]
    table = joined_table("MIG instances", columns, hidden=GPU_ROW)
    table.description(
        "How full is each MIG instance? Memory belongs to the GPU instance; its compute instances "
        "share it."
    ).no_value("No GPU is in MIG mode")
    return table.span(12).min_width(60)


SPECIAL: list[Panel] = [
    _mig(),
    _lines("Fans", _named(value("fan_speed_ratio"), " fan {{fan}}", ("fan",)), Unit.RATIO)
    .description("How fast are the fans? GPUs for servers have none.")
    .no_value("These GPUs have no fans"),
]


def _inventory() -> Panel:
    facts = gpu_value("gpu_info", "name", "pci_bus_id")
    energy = row(GPU_ROW, f"increase({value('energy_joules_total', '$__range')})")
    # A node that went down has no rows, although its GPUs took energy before.
    of_present = among(GPU_ROW, f"{energy} / 3.6e6", gpu_value("gpu_info"))
    columns = [
        GPU_NAME,
        Column("Product", facts, label="name", width=190),
        Column("Bus id", facts, label="pci_bus_id", width=150),
        Column("Processes", gpu_value("processes")),
        Column("Power limit", gpu_value("power_limit_watts"), unit=Unit.WATTS),
        Column("Max limit", gpu_value("power_limit_max_watts"), unit=Unit.WATTS),
        Column("Energy", of_present, unit=Unit.KILOWATT_HOURS),
        Column("State", gpu_value("performance_state"), unit="prefix:P"),
        Column("ECC", gpu_value("ecc_enabled"), names={"0": "off", "1": "on"}),
        Column("MIG", gpu_value("mig_enabled"), names={"0": "off", "1": "on"}),
    ]
    table = joined_table("Devices", columns, sort="GPU", hidden=GPU_ROW)
    table.description(
        "What is installed, how is it set, and how much energy did it take in the time range? P0 "
        "is full speed, P8 is idle."
    ).no_value(NO_GPU)
    return table.min_width(60)


INVENTORY: list[Panel] = [_inventory()]
