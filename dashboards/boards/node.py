"""The dashboard "GPU node": which GPU is sick, idle or slow, and who holds its memory."""

from __future__ import annotations

from collections.abc import Mapping

from dashboards import board, recorded
from dashboards.boards.node_subjects import (
    ERRORS,
    INVENTORY,
    LINKS,
    MEMORY,
    OVER_TIME,
    POWER_AND_CLOCKS,
    SPECIAL,
    UTILIZATION,
)
from dashboards.colors import (
    ANY_HAS_FAILED,
    ANY_IS_WRONG,
    GPU_POWER,
    GPU_TEMPERATURE,
    GPU_UTILIZATION,
    MEMORY_USED,
    STRANDED,
    Levels,
)
from dashboards.gpus import (
    HEALTH,
    NO_XID,
    THROTTLING,
    XID_COLORS,
    gpu_value,
    newest_xid,
    throttling,
    value,
)
from dashboards.panels import (
    LAUNCH_OF_LINKS,
    NAME_WIDTH,
    Column,
    Panel,
    Query,
    Unit,
    joined_table,
    stat_panel,
)
from dashboards.queries import (
    GPU_NAMES,
    GPU_ROW,
    SCRAPED,
    SICK_GPUS,
    append_matcher,
    filters,
    live,
    row,
    select,
)

from torchmem.explain.thresholds import defaults
from torchmem.metrics import catalog
from torchmem.metrics.catalog import MetricSpec
from torchmem.metrics.colors import ATTENTION, FAILED, GOOD

NO_PROCESS = "No process uses a GPU here"
NOTHING = "–"  # where the table above already says that there is no GPU
PROCESS_ROW = (*GPU_ROW, "pid")
PROCESS_FACTS = ("name", "user", "run", "launch", "rank", *board.SCHEDULED, "unit")

_SHIPPED_XIDS = f"round(increase({value('xid_errors_total', '$__range')}))"
_DRIVERS = f"count by (driver_version, cuda_version) ({value('driver_info')})"
_NVML_DOWN = f"count by (reason) ({select(catalog.NVML_UP)} == 0)"
NUMBERS: list[Panel] = [
    stat_panel("GPUs", f"sum({select(catalog.NVML_GPU_UP)})", Unit.NUMBER, empty="0").description(
        "How many GPUs does the driver reach on the selected nodes?"
    ),
    stat_panel(
        "Unhealthy GPUs", SICK_GPUS, Unit.COUNT, levels=ANY_HAS_FAILED, empty="0"
    ).description(
        "How many GPUs are lost, or need a reset or a replacement? The table says what each "
        "of them needs."
    ),
    stat_panel(
        "XID errors", f"sum({_SHIPPED_XIDS})", Unit.COUNT, levels=ANY_IS_WRONG, empty="0"
    ).description(
        "How many errors did the driver report in the selected time range, including those "
        "caused by programs? The row Errors lists and explains them."
    ),
    stat_panel("Power", f"sum({value('power_watts')})", Unit.WATTS, empty=NOTHING).description(
        "How much power do the selected GPUs draw together?"
    ),
    stat_panel(
        "Nodes by driver",
        [
            Query(_DRIVERS, "driver {{driver_version}}, CUDA {{cuda_version}}", GOOD),
            Query(_NVML_DOWN, "NVML is down: {{reason}}", ATTENTION),
        ],
        Unit.COUNT,
        empty="No exporter matches the selection",
    )
    .description(
        "Which versions of the driver and CUDA are installed, on how many nodes, and where "
        "does the driver not respond? Several versions may mean that an upgrade is "
        "incomplete. All values of GPUs are missing while NVML is down."
    )
    .span(8),
]


def _with_unit(expression: str) -> str:
    """Add the label unit: the UID of a pod without a name, else the systemd unit."""
    for label in ("systemd_unit", "pod_uid"):
        expression = f'label_replace({expression}, "unit", "$1", "{label}", "(.+)")'
    return f'label_replace({expression}, "unit", "", "pod", ".+")'


_OF_GPUS = ", ".join(filters({"cluster", *SCRAPED, "uuid"}))


def _of_any_rank(spec: MetricSpec, over: str = "") -> str:
    """Return a metric of live ranks, or its minimum `over` a range, filtered by node and GPU.

    Run and rank are hidden here.
    """
    selector = f"{spec.name}{{{_OF_GPUS}}}"
    return live(f"min_over_time({selector}[{over}])" if over else selector)


def _rows() -> tuple[str, str]:
    """Return name and health of every GPU, and of every node without one."""
    nvml, gpus = select(catalog.NVML_UP), f"({select(recorded.NODE_GPUS)} > 0)"
    without = f"({nvml} unless on (instance) {gpus})"
    names = f'label_replace({without}, "short_name", "$1", "instance", "(.*)")'
    down = f'label_replace({without} == 0, "health", "nvml_down", "", "")'
    none = f'label_replace({without} == 1, "health", "no_gpu", "", "")'
    return (
        row(GPU_ROW, f"{GPU_NAMES} or {names}", "short_name"),
        row(GPU_ROW, f"{select(recorded.HEALTH)} or {down} or {none}", "health"),
    )


def _largest_rank() -> str:
    """Return run and rank of the process that reserves most on each GPU."""
    reserved = (
        f"sum by ({', '.join(GPU_ROW)}, run, launch, rank) ({_of_any_rank(catalog.RESERVED)})"
    )
    return row(GPU_ROW, f"topk by (instance, uuid) (1, {reserved})", "run", "launch", "rank")


def _words(
    heading: str,
    query: str,
    meanings: Mapping[str, tuple[str, str]],
    label: str | None = None,
    width: int | None = None,
) -> Column:
    """Return a column that shows values or labels as words in their colors."""
    names = {key: name for key, (name, _) in meanings.items()}
    colors = {key: color for key, (_, color) in meanings.items()}
    return Column(
        heading, query, label=label, names=names, colors=colors, width=width, centered=True
    )


def _gpus() -> Panel:
    names, health = _rows()
    rank = _largest_rank()
    columns = [
        Column("GPU", names, label="short_name", width=170),
        _words("State", health, HEALTH, label="health", width=130),
        *_bars(),
        _words("Throttled", throttling(), THROTTLING, width=110),
        *_errors(),
        Column("Run", rank, label="run", link=board.LINK_TO_RANK, width=NAME_WIDTH),
        LAUNCH_OF_LINKS,
        Column("Rank", rank, label="rank", width=60),
    ]
    table = joined_table("GPUs now", columns, sort="GPU", hidden=GPU_ROW)
    table.description(
        "Which GPU is faulty, idle or slow? State: what the driver recommends. Stranded: the share "
        "of the memory that PyTorch holds but can neither use nor return. Power: the share of the "
        "limit. Throttled: what lowers the clocks; a power cap is usual under load, heat points to "
        "the cooling. ECC: memory errors since the driver was loaded that ECC could not correct. "
        "XID: the newest error within the time range. Run: the run of the rank with most memory."
    ).no_value(
        "No GPU here: NVML reports none, or is not available (see Driver). Values of ranks on this "
        "node are on the dashboard Training memory."
    )
    return table.height(11).min_width(80)


def _bars() -> list[Column]:
    """Return the values that fill a cell in proportion."""

    def bar(heading: str, query: str, levels: Levels) -> Column:
        return Column(heading, query, unit=Unit.RATIO, bar=True, levels=levels)

    memory = f"{gpu_value('memory_used_bytes')} / {gpu_value('memory_total_bytes')}"
    stranded = row(GPU_ROW, select(recorded.PART, part="stranded"))
    stranded_ratio = f"{stranded} / {row(GPU_ROW, select(recorded.TOTAL))}"
    temperature = Column(
        "Temperature",
        gpu_value("temperature_celsius", sensor="gpu"),
        unit=Unit.CELSIUS,
        bar=True,
        highest=100,
        levels=GPU_TEMPERATURE,
    )
    power = f"{gpu_value('power_watts')} / {gpu_value('power_limit_watts')}"
    return [
        bar("Memory", memory, MEMORY_USED),
        bar("Stranded", stranded_ratio, STRANDED),
        bar("Utilization", gpu_value("utilization_ratio", engine="gpu"), GPU_UTILIZATION),
        temperature,
        bar("Power", power, GPU_POWER),
    ]


def _errors() -> list[Column]:
    uncorrected = gpu_value("ecc_errors_total", kind="uncorrected", scope="volatile")
    xids = {NO_XID: GOOD, **XID_COLORS}
    return [
        Column(
            "ECC", uncorrected, names={"0": "None"}, levels=ANY_HAS_FAILED, width=70, centered=True
        ),
        Column("XID", newest_xid(), label="xid", colors=xids, width=70, centered=True),
    ]


def _named_rows(expression: str, *labels: str) -> str:
    """Return a value for each process on a GPU, with the GPU's name."""
    return (
        f"max by ({', '.join((*PROCESS_ROW, *labels, 'short_name'))}) ({expression} "
        f"* on (instance, uuid) group_left (short_name) ({GPU_NAMES}))"
    )


def _processes() -> Panel:
    facts = row(PROCESS_ROW, _with_unit(value("process_info")), *PROCESS_FACTS)
    memory = row(PROCESS_ROW, select(catalog.NVML_PROCESS_MEMORY))
    # The rank and NVML are not read at the same moment: the lowest of a few scrapes fits best.
    outside = row(PROCESS_ROW, _of_any_rank(catalog.OUTSIDE_ALLOCATOR, over="$__rate_interval"))
    busy = row(PROCESS_ROW, value("process_utilization_ratio", engine="sm"))
    named_rows = _named_rows(memory)
    columns = [
        Column("GPU", named_rows, label="short_name", width=170),
        Column("Pid", label="pid", width=90),
        Column("Name", facts, label="name"),
        Column("User", facts, label="user"),
        Column("Run", facts, label="run", link=board.LINK_TO_RANK),
        LAUNCH_OF_LINKS,
        Column("Rank", facts, label="rank", width=60),
        *board.scheduled(facts),
        Column("Unit", facts, label="unit"),
        Column("Memory", named_rows, unit=Unit.BYTES),
        Column("PyTorch", f"{memory} - {outside}", unit=Unit.BYTES),
        Column("Outside", outside, unit=Unit.BYTES),
        Column("Utilization", busy, unit=Unit.RATIO, bar=True, levels=GPU_UTILIZATION),
    ]
    table = joined_table("Processes", columns, sort="Memory", descending=True, hidden=GPU_ROW)
    table.description(
        "Which processes hold the memory? The table lists every process on every GPU, whether it "
        "uses PyTorch or not. Run and rank are known for processes with torchmem's SDK. PyTorch is "
        "what the allocator holds; outside is what the process holds in addition: CUDA context, "
        "NCCL, other libraries. Names are known if the exporter can see the host's processes. The "
        "pid other stands for all processes beyond the largest ones."
    ).no_value(NO_PROCESS)
    return table.height(9).min_width(80)


DEAD, MISPLACED, EMPTY = "dead", "misplaced", "empty"
WRONG_HOLDERS = {
    DEAD: ("Process is gone", FAILED),
    MISPLACED: ("Another rank's GPU", ATTENTION),
    EMPTY: ("Given, no process", ATTENTION),
}


HOLDER_FACTS = ("user", "run", "launch", "rank")


def _held_for_nothing() -> str:
    """Return the memory of each GPU and process, with the label why."""
    dead = append_matcher(value("process_info"), f'state="{DEAD}"')
    held = (
        f"{select(catalog.NVML_PROCESS_MEMORY)} * on (instance, uuid, pid) "
        f"group_left ({', '.join(HOLDER_FACTS)}) {dead}"
    )
    misplaced = f"{catalog.MISPLACED.name}{{{_OF_GPUS}}}"
    seconds = defaults().values["gpu_assigned_empty_seconds"]
    empty = (
        f"{value('gpu_assignment_info')} * on (instance, uuid) group_left () "
        f"({value('memory_used_bytes')} and on (instance, uuid) "
        f"{value('gpu_assigned_empty_seconds')} >= {seconds})"
    )
    empty_mig = (
        f"{value('mig_assignment_info')} * on (instance, uuid, gpu_instance) group_left () "
        f"{value('mig_memory_used_bytes')} and on (instance, uuid, gpu_instance, compute_instance) "
        f"{value('mig_assigned_empty_seconds')} >= {seconds}"
    )
    found = ((DEAD, held), (MISPLACED, misplaced), (EMPTY, empty), (EMPTY, empty_mig))
    return " or ".join(
        f'label_replace({expression}, "why", "{why}", "", "")' for why, expression in found
    )


def _wrong_holders() -> Panel:
    labels = ("why", *HOLDER_FACTS, *board.SCHEDULED)
    rows = _named_rows(f"({_held_for_nothing()})", *labels)
    columns = [
        Column("GPU", rows, label="short_name", width=170),
        _words("Why", rows, WRONG_HOLDERS, label="why", width=160),
        Column("Pid", label="pid", width=90),
        Column("User", rows, label="user"),
        Column("Run", rows, label="run", link=board.LINK_TO_RANK),
        LAUNCH_OF_LINKS,
        Column("Rank", rows, label="rank", width=60),
        *board.scheduled(rows),
        Column("Memory", rows, unit=Unit.BYTES),
    ]
    table = joined_table(
        "Held for nothing", columns, sort="Memory", descending=True, hidden=GPU_ROW
    )
    table.description(
        "Who holds a GPU or its memory without need? Process is gone: NVML still counts memory of "
        "a process that the node no longer has; end its children, or reset the GPU. Another "
        "rank's GPU: the rank has a context, or all its tensors, on a GPU that is not its own; "
        "call torch.cuda.set_device first. Given, no process: Slurm or the kubelet gave the GPU "
        "away at least ten minutes ago, and nothing runs on it."
    ).no_value("None, or the exporter does not see the node's processes")
    return table.height(5).min_width(60)


XID_MARK = board.Mark(
    "XID",
    f"1000 * {value('xid_last_timestamp_seconds')}",
    "XID {{xid}} on {{instance}} GPU {{gpu}}",
    FAILED,
    at_value=True,
)

BOARD = board.Board(
    board.NODE,
    "GPU node",
    "The GPUs of a node as the driver reports them: health, memory and the processes that hold "
    "it, utilization, power and temperature, errors, links, MIG. Needs an exporter that reaches "
    "the driver, and the recording rules. Names of processes need the node's processes, pods the "
    "kubelet, and utilization by unit Hopper or newer.",
    board.NODE_VARIABLES,
    (
        board.Row("Which GPU needs attention?", [*NUMBERS, _gpus()]),
        board.Row("Who holds the memory?", [_processes()]),
        board.Row("Over time", OVER_TIME, collapsed=True),
        board.Row("Memory", [_wrong_holders(), *MEMORY], collapsed=True),
        board.Row("Utilization by unit", UTILIZATION, collapsed=True),
        board.Row("Clocks, throttling and limits", POWER_AND_CLOCKS, collapsed=True),
        board.Row("Errors", ERRORS, collapsed=True),
        board.Row("PCIe and NVLink", LINKS, collapsed=True),
        board.Row("MIG and fans", SPECIAL, collapsed=True),
        board.Row("Inventory", INVENTORY, collapsed=True),
    ),
    (XID_MARK,),
)
