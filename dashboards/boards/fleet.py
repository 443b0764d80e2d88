"""The dashboard "Fleet": which rank runs out of memory first, what is wasted, and what is wrong."""

from __future__ import annotations

from dashboards import recorded
from dashboards.board import ALL_VARIABLES, FLEET, LINK_TO_NODE, LINK_TO_RUN, OOM_MARK, Board, Row
from dashboards.colors import ANY_IS_WRONG
from dashboards.panels import (
    PARTS_EXPLAINED,
    RANKS_BY_STATE,
    Column,
    Panel,
    Query,
    Text,
    Unit,
    bars,
    joined_table,
    lines,
    memory_stack,
    stat_panel,
)
from dashboards.queries import (
    DEVICE_ROW,
    GPU_ROW,
    OOMS_IN_RANGE,
    RUN_ROW,
    among,
    append_matcher,
    prepend_matcher,
    row,
    select,
)

from torchmem.sample import catalog
from torchmem.sample.catalog import MetricSpec
from torchmem.sample.colors import CAUSES, SEVERITIES

NO_NVML = "No GPU: NVML is not available on any node"
NO_RUN = "No run matches the selection"

# Rows of the table of ranks with the least headroom; ranks with falling headroom come on top.
MAX_RANKS = 20

ALERT_ROW = ("severity", "alertname", "run", "rank", "instance", "gpu")


def _alerts_of_torchmem(selector: str) -> str:
    """Select the alerts of torchmem, without the one that always fires."""
    return prepend_matcher(selector, 'alertname=~"Torchmem.*",severity!="none"')


FIRING = row(ALERT_ROW, _alerts_of_torchmem(select(recorded.ALERTS, alertstate="firing")))
FIRING_SINCE_MILLISECONDS = among(
    ALERT_ROW,
    row(ALERT_ROW, f"1000 * {_alerts_of_torchmem(select(recorded.ALERTS_SINCE))}"),
    FIRING,
)

NUMBERS: list[Panel] = [
    stat_panel(
        Text(
            "GPUs",
            "How many GPUs does the driver reach on the selected nodes?",
            NO_NVML,
        ),
        Query(f"sum({select(recorded.NODE_GPUS)})"),
        Unit.COUNT,
    ),
    stat_panel(
        Text(
            "GPUs lost",
            "How many GPUs stopped responding, and are missing from all other numbers? The "
            "dashboard GPU node shows their error codes.",
            NO_NVML,
        ),
        Query(f"sum({select(recorded.NODE_GPUS_LOST)})"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "Wasted, in GPUs",
            "How much memory is unusable, expressed in whole GPUs? It counts idle GPUs whose "
            "memory is held, and memory stranded by fragmentation.",
            "No data yet",
        ),
        Query(f"sum({select(recorded.NODE_WASTED)})"),
        Unit.COUNT,
    ).decimals(1),
    stat_panel(
        Text(
            "Idle GPUs, memory held",
            "On how many GPUs do processes hold memory although nothing has run for "
            "10 minutes? The cause is often a forgotten notebook or a hung job.",
            NO_NVML,
        ),
        Query(f"sum({select(recorded.NODE_IDLE_HELD)})"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "OutOfMemoryErrors",
            "How often did processes run out of memory within this time range, whether the "
            "script caught the errors or not? The dashboard After an OOM shows the ranks.",
            "No ranks",
        ),
        Query(OOMS_IN_RANGE),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text("Alerts firing", "How many torchmem alerts are firing? They are listed below."),
        Query(f"count({FIRING}) or vector(0)"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
]


def _alerts() -> Panel:
    text = Text(
        "Firing alerts",
        "What needs attention? These are the alerts of prometheus/rules; docs/runbooks has a page "
        "for each of them.",
        "No alert is firing",
    )
    columns = [
        Column("Severity", FIRING, label="severity", colors=SEVERITIES, width=100),
        Column("Alert", label="alertname"),
        Column("Run", label="run", link=LINK_TO_RUN),
        Column("Rank", label="rank", width=70),
        Column("Node", label="instance", link=LINK_TO_NODE),
        Column("GPU", label="gpu", width=70),
        Column("Active since", FIRING_SINCE_MILLISECONDS, unit=Unit.AGO),
    ]
    return joined_table(text, columns, sort="Severity").span(16).height(8)


def _states() -> Panel:
    text = Text(
        "Ranks by state",
        "What state are the training processes in? A stalled rank is alive but has not finished a "
        "step for a while. Ended processes count for 15 minutes.",
        "No ranks",
    )
    return stat_panel(text, RANKS_BY_STATE, Unit.COUNT).span(8).height(8)


def _least_headroom() -> Panel:
    text = Text(
        "Ranks with the least headroom",
        f"Which rank will run out of memory first? The table lists the {MAX_RANKS} ranks with the "
        "least headroom, and all ranks whose headroom is falling, with the time until it reaches "
        "zero at the trend of the last 15 minutes. Headroom is the largest tensor that would fit "
        "after the allocator has released its cache; the lowest value of the last 5 minutes is "
        "used.",
        "No snapshot of any rank yet",
    )
    headroom = row(DEVICE_ROW, select(recorded.MIN_HEADROOM))
    share = row(DEVICE_ROW, f"{select(recorded.MIN_HEADROOM)} / {select(catalog.DEVICE_TOTAL)}")
    exhaustion = row(DEVICE_ROW, select(recorded.EXHAUSTION))
    listed = f"(bottomk({MAX_RANKS}, {share}) or {exhaustion})"
    stranded, retries = (
        row(DEVICE_ROW, select(spec)) for spec in (recorded.STRANDED_RATIO, recorded.RETRIES_10M)
    )
    columns = [
        Column("Run", label="run", link=LINK_TO_RUN),
        Column("Rank", label="rank", width=70),
        Column("Node", label="instance", link=LINK_TO_NODE),
        Column("GPU", label="gpu", width=60),
        Column("Pid", label="pid", width=90),
        Column("Headroom", among(DEVICE_ROW, headroom, listed), unit=Unit.BYTES),
        Column("Of the GPU", among(DEVICE_ROW, share, listed), unit=Unit.RATIO, bar=True),
        Column("Exhausted in", exhaustion, unit=Unit.SECONDS),
        Column("Stranded", among(DEVICE_ROW, stranded, listed), unit=Unit.RATIO, bar=True),
        Column("Retries in 10 min", among(DEVICE_ROW, retries, listed)),
    ]
    return joined_table(text, columns, sort="Of the GPU")


def _of_run(spec: MetricSpec) -> str:
    return row(RUN_ROW, select(spec))


def _ranks_in(states: str) -> str:
    """Return the processes of each run in one of the states, which are separated by |."""
    ranks = append_matcher(select(recorded.RUN_RANKS), f'state=~"{states}"')
    return f"sum by (run) ({ranks})"


_OOMS_OF_RUN = f"sum by (run) ({select(recorded.RUN_OOMS)})"


def _runs() -> Panel:
    text = Text(
        "Runs",
        "How is each run doing? Alive counts processes that are running or stalled. Failed counts "
        "processes that failed with an exception, ran out of memory, or were killed in the last 15 "
        "minutes. Imbalance is the most loaded rank divided by the mean of the others.",
        NO_RUN,
    )
    columns = [
        Column("Run", label="run", link=LINK_TO_RUN),
        Column("Alive", _ranks_in("running|stalled"), width=80),
        Column("Failed", _ranks_in("failed|oom|killed"), width=80),
        Column("Reserved, fullest GPU", _of_run(recorded.RUN_RESERVED_MAX), unit=Unit.BYTES),
        Column("Least headroom", _of_run(recorded.RUN_HEADROOM), unit=Unit.BYTES),
        Column("Slack at peak", _of_run(recorded.RUN_SLACK), unit=Unit.RATIO, bar=True),
        Column("Imbalance", _of_run(recorded.RUN_IMBALANCE)),
        Column("Retries per min", f"60 * {_of_run(recorded.RUN_RETRIES)}", unit=Unit.PER_MINUTE),
        Column("OOMs in 1 h", f"{_OOMS_OF_RUN} or 0 * {_ranks_in('.*')}"),
        Column("Step", _of_run(recorded.RUN_STEP), unit=Unit.SECONDS),
    ]
    return joined_table(text, columns, sort="Least headroom")


OVER_TIME: list[Panel] = [
    lines(
        Text(
            "Reserved by run",
            "How much memory does each run hold, over all of its GPUs?",
            NO_RUN,
        ),
        [Query(_of_run(recorded.RUN_RESERVED), "{{run}}")],
        Unit.BYTES,
    ),
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
    ),
]

MEMORY: list[Panel] = [
    memory_stack(
        Text("Memory of all GPUs", f"What is the memory used for? {PARTS_EXPLAINED}", NO_NVML),
        lambda part: f"sum({select(recorded.NODE_PART, part=part)})",
        Query(f"sum({select(recorded.NODE_TOTAL)})", "Total"),
    ).span(12),
    lines(
        Text(
            "Wasted, in GPUs, by node",
            "Where is memory wasted, and since when? A value of 1 is the memory of one whole "
            "GPU that is idle but held, or stranded by fragmentation.",
            "No data yet",
        ),
        [Query(select(recorded.NODE_WASTED), "{{instance}}")],
        Unit.COUNT,
    ).height(9),
]


def _wasteful() -> Panel:
    text = Text(
        "GPUs with wasted memory",
        "Which GPUs waste memory, and why? A GPU whose memory is held while it is idle is wasted "
        "completely; of other GPUs, the stranded share is wasted.",
        "No GPU wastes memory",
    )
    wasted = f"{row(GPU_ROW, select(recorded.WASTED))} > 0"

    def of_wasteful(spec: MetricSpec) -> str:
        return among(GPU_ROW, row(GPU_ROW, select(spec)), f"({wasted})")

    columns = [
        Column("Node", label="instance", link=LINK_TO_NODE),
        Column("GPU", label="gpu"),
        Column("Wasted", wasted, unit=Unit.RATIO, bar=True),
        Column("Idle, but held", of_wasteful(recorded.IDLE_HELD), names={"0": "no", "1": "yes"}),
        Column(
            "Share of the last hour", of_wasteful(recorded.IDLE_HELD_1H), unit=Unit.RATIO, bar=True
        ),
        Column("Memory", of_wasteful(recorded.TOTAL), unit=Unit.BYTES),
    ]
    return joined_table(text, columns, sort="Wasted", descending=True).height(8)


BOARD = Board(
    FLEET,
    "Fleet",
    "All nodes and runs: which rank will run out of GPU memory first, what is wasted, and what "
    "is wrong.",
    ALL_VARIABLES,
    (
        Row("Is anything wrong?", [*NUMBERS, _alerts(), _states()]),
        Row("Which rank runs out first?", [_least_headroom()]),
        Row("How are the runs doing?", [_runs(), *OVER_TIME]),
        Row("What is wasted?", [*MEMORY, _wasteful()]),
    ),
    (OOM_MARK,),
)
