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
    Text,
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
    text = Text(
        "All nodes",
        "How is each node doing? Unhealthy GPUs are lost, or need a reset or a replacement. Wasted "
        "counts idle GPUs whose memory is held, and memory stranded by fragmentation, in GPUs.",
        "Prometheus scrapes no exporter",
    )
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
    return joined_table(text, columns, sort="Wasted", descending=True).height(10).min_width(80)


NODES: list[Panel] = [_nodes()]

OVER_TIME: list[Panel] = [
    memory_stack(
        Text("Memory of all GPUs", f"What is the memory used for? {PARTS_EXPLAINED}", NO_NVML),
        lambda part: f"sum({select(recorded.NODE_PART, part=part)})",
        Query(f"sum({select(recorded.NODE_TOTAL)})", "Total"),
    ),
    lines(
        Text(
            "Reserved by run",
            "How much memory does each run hold, over all of its GPUs? The panel shows the "
            "largest runs.",
            "No run matches the selection",
        ),
        [Query(worst(row(RUN_ROW, select(recorded.RUN_RESERVED)), RUN_ROW), "{{run}}")],
        Unit.BYTES,
    ).height(9),
    lines(
        Text(
            "Wasted GPUs by node",
            "Where is memory wasted, and since when? A value of 1 is the memory of one whole GPU "
            "that is idle but held, or stranded by fragmentation. The panel shows the most "
            "wasteful nodes.",
            NO_NVML,
        ),
        [Query(worst(row(NODE_ROW, select(recorded.NODE_WASTED)), NODE_ROW), "{{instance}}")],
        Unit.COUNT,
    ).height(9),
    bars(
        Text(
            "OutOfMemoryErrors per hour, by cause",
            "When did ranks run out of memory, and why? Each bar counts the errors of the "
            "preceding hour.",
            "No OutOfMemoryError",
        ),
        [
            Query(f"sum({select(recorded.RUN_OOMS, cause=cause)}) > 0", cause, color)
            for cause, color in CAUSES.items()
        ],
        Unit.COUNT,
    ).height(9),
    lines(
        Text(
            "Power by node",
            "How much power do the GPUs of each node draw? The panel shows the nodes that draw "
            "most.",
            NO_NVML,
        ),
        [Query(worst(row(NODE_ROW, select(recorded.NODE_POWER)), NODE_ROW), "{{instance}}")],
        Unit.WATTS,
    ).height(9),
]
