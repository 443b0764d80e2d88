"""The rows of the dashboard "Fleet" that are opened on demand: nodes, and everything over time."""

from __future__ import annotations

from dashboards import recorded
from dashboards.board import LINK_TO_NODE
from dashboards.colors import ANY_HAS_FAILED, GPU_UTILIZATION, MEMORY_USED
from dashboards.panels import (
    PARTS_EXPLAINED,
    Column,
    Panel,
    Query,
    Unit,
    bars,
    joined_table,
    lines,
    memory_stack,
)
from dashboards.queries import RUN_ROW, SICK, row, select, worst

from torchmem.metrics import catalog
from torchmem.metrics.colors import CAUSES

NODE_ROW = ("instance",)
NO_NVML = "No GPU: NVML is not available on any node"


def _nodes() -> Panel:
    used, total = (
        f"sum by (instance) ({select(spec)})"
        for spec in (catalog.NVML_MEMORY_USED, catalog.NVML_MEMORY_TOTAL)
    )
    utilization = select(catalog.NVML_UTILIZATION, engine="gpu")
    sick = f"count by (instance) ({SICK}) or 0 * {row(NODE_ROW, select(recorded.NODE_GPUS))}"
    columns = [
        Column("Node", label="instance", link=LINK_TO_NODE),
        Column("NVML", row(NODE_ROW, select(catalog.NVML_UP)), names={"0": "down", "1": "up"}),
        Column("GPUs", row(NODE_ROW, select(recorded.NODE_GPUS))),
        Column("Unhealthy", sick, levels=ANY_HAS_FAILED),
        Column("Memory", f"{used} / {total}", unit=Unit.RATIO, bar=True, levels=MEMORY_USED),
        Column(
            "Utilization",
            f"avg by (instance) ({utilization})",
            unit=Unit.RATIO,
            bar=True,
            levels=GPU_UTILIZATION,
        ),
        Column("Wasted", row(NODE_ROW, select(recorded.NODE_WASTED)), decimals=1),
        Column("Idle, memory held", row(NODE_ROW, select(recorded.NODE_IDLE_HELD))),
        Column("Power", row(NODE_ROW, select(recorded.NODE_POWER)), unit=Unit.WATTS),
    ]
    table = joined_table("All nodes", columns, sort="Wasted", descending=True)
    table.description(
        "How is each node doing? Unhealthy GPUs are lost, or need a reset or a replacement. Wasted "
        "counts idle GPUs whose memory is held, and memory stranded by fragmentation, in GPUs."
    ).no_value("Prometheus scrapes no exporter")
    return table.height(10).min_width(80)


NODES: list[Panel] = [_nodes()]

OVER_TIME: list[Panel] = [
    memory_stack(
        "Memory of all GPUs",
        lambda part: f"sum({select(recorded.NODE_PART, part=part)})",
        Query(f"sum({select(recorded.NODE_TOTAL)})", "Total"),
    )
    .description(f"What is the memory used for? {PARTS_EXPLAINED}")
    .no_value(NO_NVML),
    lines(
        "Reserved by run",
        Query(worst(row(RUN_ROW, select(recorded.RUN_RESERVED)), RUN_ROW), "{{run}}"),
        Unit.BYTES,
    )
    .description(
        "How much memory does each run hold, over all of its GPUs? The panel shows the "
        "largest runs."
    )
    .no_value("No run matches the selection")
    .height(9),
    lines(
        "Wasted GPUs by node",
        Query(worst(row(NODE_ROW, select(recorded.NODE_WASTED)), NODE_ROW), "{{instance}}"),
        Unit.COUNT,
    )
    .description(
        "Where is memory wasted, and since when? A value of 1 is the memory of one whole GPU that "
        "is idle but held, or stranded by fragmentation. The panel shows the most wasteful nodes."
    )
    .no_value(NO_NVML)
    .height(9),
    bars(
        "OutOfMemoryErrors per hour, by cause",
        [
            Query(f"sum({select(recorded.RUN_OOMS, cause=cause)}) > 0", cause, color)
            for cause, color in CAUSES.items()
        ],
        Unit.COUNT,
    )
    .description(
        "When did ranks run out of memory, and why? Each bar counts the errors of the "
        "preceding hour."
    )
    .no_value("No OutOfMemoryError")
    .height(9),
    lines(
        "Power by node",
        Query(worst(row(NODE_ROW, select(recorded.NODE_POWER)), NODE_ROW), "{{instance}}"),
        Unit.WATTS,
    )
    .description(
        "How much power do the GPUs of each node draw? The panel shows the nodes that draw most."
    )
    .no_value(NO_NVML)
    .height(9),
]
