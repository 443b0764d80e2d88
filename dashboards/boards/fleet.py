"""The dashboard "Fleet": who will run out of memory first, what is wasted, and what is wrong, over all nodes."""

from __future__ import annotations

from dashboards import choices, common
from dashboards.colors import CAUSES, SEVERITIES, STATES
from dashboards.panels import (
    Board,
    Column,
    Panel,
    Query,
    Text,
    bars,
    joined_table,
    lines,
    stack,
    stat_panel,
)
from dashboards.panels.units import AGO, BYTES, COUNT, PER_MINUTE, RATIO, SECONDS
from dashboards.queries import fleet, oom, ranks, recorded

NO_NVML = "No GPU: NVML does not answer anywhere"
NO_RUN = "No run matches the choice above"


def _numbers() -> list[Panel]:
    return [
        stat_panel(
            Text("GPUs that answer", "How many GPUs does the driver reach on the chosen nodes?", NO_NVML),
            Query(fleet.gpus()), COUNT),
        stat_panel(
            Text("GPUs lost", "How many GPUs stopped answering, and are missing in all other numbers? See the "
                 "dashboard GPU node for their error code.", NO_NVML),
            Query(fleet.gpus_lost()), COUNT, warn_above=1),
        stat_panel(
            Text("Wasted, in GPUs", "How many whole GPUs is the memory worth that nobody can use: of idle GPUs that "
                 "somebody holds, and stranded by fragmentation?", "Nothing known yet"),
            Query(fleet.gpus_wasted()), COUNT).decimals(1),
        stat_panel(
            Text("Held but idle", "On how many GPUs does somebody hold memory while nothing has run for 10 minutes? "
                 "Often a forgotten notebook or a hung job.", NO_NVML),
            Query(fleet.gpus_idle_held()), COUNT, warn_above=1),
        stat_panel(
            Text("OutOfMemoryErrors", "How often were the processes of this time range out of memory? Click through "
                 "to After an OOM for the ranks.", "No ranks"),
            Query(oom.ooms()), COUNT, warn_above=1),
        stat_panel(
            Text("Alerts firing", "How many of torchmem's alerts fire now? They are listed below."),
            Query(fleet.alerts_firing()), COUNT, warn_above=1),
    ]  # fmt: skip


def _alerts() -> Panel:
    text = Text(
        "Alerts that fire now",
        "What does Prometheus warn of? The alerts of prometheus/rules; each name has a page in "
        "docs/runbooks that says what to do.",
        "No alert fires",
    )
    columns = [
        Column("Severity", fleet.alerts(), label="severity", colors=SEVERITIES, width=100),
        Column("Alert", label="alertname"),
        Column("Run", label="run", link=common.link(common.TRAINING, "Training memory", run="Run")),
        Column("Rank", label="rank", width=70),
        Column("Node", label="instance", link=common.link(common.NODE, "GPU node", node="Node")),
        Column("GPU", label="gpu", width=70),
        Column("Active since", fleet.alerts_since(), unit=AGO),
    ]
    return joined_table(text, columns, sort="Severity").span(16).height(8)


def _states() -> Panel:
    text = Text(
        "Ranks by state",
        "What do all training processes do? stalled: alive, but no step for a while. Ended ones count for 15 minutes.",
        "No ranks",
    )
    return (
        stat_panel(text, Query(ranks.by_state(), "{{state}}"), COUNT, colors=STATES)
        .span(8)
        .height(8)
    )


def _tightest() -> Panel:
    text = Text(
        "Tightest ranks",
        f"Who will run out of memory first? The {fleet.TIGHTEST} ranks with the least headroom, and all whose headroom "
        "falls, with the time until it is used up at the trend of the last 15 minutes. Headroom is the largest tensor "
        "that would still fit after the allocator has given back its cache: the least of the last 5 minutes.",
        "No snapshot of any rank yet",
    )
    columns = [
        Column("Run", label="run", link=common.link(common.TRAINING, "Training memory", run="Run")),
        Column("Rank", label="rank", width=70),
        Column("Node", label="instance", link=common.link(common.NODE, "GPU node", node="Node")),
        Column("GPU", label="gpu", width=60),
        Column("Pid", label="pid", width=90),
        Column("Headroom", fleet.tight_headroom(), unit=BYTES),
        Column("Of the GPU", fleet.tight_headroom_share(), unit=RATIO, bar=True),
        Column("Used up in", fleet.tight_exhaustion(), unit=SECONDS),
        Column("Stranded", fleet.tight_stranded(), unit=RATIO, bar=True),
        Column("Retries in 10 min", fleet.tight_retries()),
    ]
    return joined_table(text, columns, sort="Of the GPU")


def _memory() -> list[Panel]:
    return [
        stack(
            Text("Memory of all GPUs", f"Who holds the memory of the fleet? {common.PARTS_EXPLAINED}", NO_NVML),
            common.parts(fleet.part), BYTES, Query(fleet.total(), "Total")).span(12),
        lines(
            Text("Wasted, in GPUs, by node", "Where is memory wasted, and since when? 1 is the memory of one whole "
                 "GPU: idle but held, or stranded by fragmentation.", "Nothing known yet"),
            [Query(fleet.wasted_by_node(), "{{instance}}")], COUNT).height(10),
    ]  # fmt: skip


def _wasteful() -> Panel:
    text = Text(
        "GPUs with wasted memory",
        "Which GPUs waste memory, and why? A GPU that somebody holds and nobody uses is wasted whole; of others, the "
        "stranded share is.",
        "No GPU wastes memory",
    )
    columns = [
        Column("Node", label="instance", link=common.link(common.NODE, "GPU node", node="Node")),
        Column("GPU", label="gpu"),
        Column("Wasted", fleet.wasteful_share(), unit=RATIO, bar=True),
        Column("Idle, but held", fleet.wasteful(recorded.IDLE_HELD), words={"0": "no", "1": "yes"}),
        Column(
            "Share of the last hour", fleet.wasteful(recorded.IDLE_HELD_1H), unit=RATIO, bar=True
        ),
        Column("Memory", fleet.wasteful(recorded.TOTAL), unit=BYTES),
    ]
    return joined_table(text, columns, sort="Wasted", descending=True).height(8)


def _runs() -> Panel:
    text = Text(
        "Runs",
        "How is every run? Alive: its processes that run or stall. Failed: those that ran out of memory or were "
        "killed, for 15 minutes. Imbalance: the most loaded rank over the mean of the others.",
        NO_RUN,
    )
    columns = [
        Column("Run", label="run", link=common.link(common.TRAINING, "Training memory", run="Run")),
        Column("Alive", fleet.run_ranks("running|stalled"), width=80),
        Column("Failed", fleet.run_ranks("oom|killed"), width=80),
        Column("Reserved, fullest GPU", fleet.run_value(recorded.RUN_RESERVED_MAX), unit=BYTES),
        Column("Least headroom", fleet.run_value(recorded.RUN_HEADROOM), unit=BYTES),
        Column("Slack at peak", fleet.run_value(recorded.RUN_SLACK), unit=RATIO, bar=True),
        Column("Imbalance", fleet.run_value(recorded.RUN_IMBALANCE)),
        Column("Retries per min", fleet.run_retries(), unit=PER_MINUTE),
        Column("OOMs in 1 h", fleet.run_ooms()),
        Column("Step", fleet.run_value(recorded.RUN_STEP), unit=SECONDS),
    ]
    return joined_table(text, columns, sort="Least headroom")


def _over_time() -> list[Panel]:
    return [
        lines(
            Text("Reserved by run", "How much memory does each run hold, over all its GPUs?", NO_RUN),
            [Query(fleet.run_value(recorded.RUN_RESERVED), "{{run}}")], BYTES),
        bars(
            Text("OutOfMemoryErrors within an hour, by cause", "When did ranks run out of memory, and why? At each "
                 "moment the errors of the hour before it.", "No OutOfMemoryError"),
            [Query(f"{fleet.ooms_by_cause(cause)} > 0", cause, color) for cause, color in CAUSES.items()], COUNT),
    ]  # fmt: skip


BOARD = Board(
    common.FLEET,
    "Fleet",
    "All nodes and runs: who will run out of GPU memory first, what is wasted, and what is wrong.",
    choices.EVERYTHING,
    {
        "Is anything wrong?": [*_numbers(), _alerts(), _states()],
        "Who will run out first?": [_tightest()],
        "How are the runs?": [_runs(), *_over_time()],
        "What is wasted?": [*_memory(), _wasteful()],
    },
    (common.OOM_NOTE,),
)
