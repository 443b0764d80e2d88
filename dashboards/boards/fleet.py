"""The dashboard "Fleet": who is in trouble, which rank runs out first, and what is wasted."""

from __future__ import annotations

from dashboards import board, reasons, recorded
from dashboards import colors as levels
from dashboards.boards import fleet_costs, fleet_report
from dashboards.boards.fleet_subjects import NODES, OVER_TIME
from dashboards.panels import (
    LAUNCH_OF_LINKS,
    RANKS_BY_STATE,
    Column,
    Panel,
    Unit,
    joined_table,
    stat_panel,
)
from dashboards.queries import (
    DEVICE_ROW,
    EXHAUSTION,
    GPU_HOURS,
    GPU_ROW,
    HEADROOM_SHARE,
    OOMS_IN_RANGE,
    RUN_ROW,
    SICK_GPUS,
    WASTED_GPU_HOURS,
    among,
    append_matcher,
    names_among,
    ooms_in_range,
    prepend_matcher,
    row,
    select,
    some_gpus,
)

from torchmem.metrics import catalog
from torchmem.metrics.catalog import MetricSpec
from torchmem.metrics.colors import ATTENTION, PARTS, SEVERITIES

NO_RUN = "No run matches the selection"

# Rows of the table of ranks with the least headroom; ranks with falling headroom come on top.
MAX_RANKS = 20
# Rows of the table of GPUs that waste most, and what is too little to be listed.
MAX_WASTEFUL = 20
MIN_WASTED_GPU_HOURS = 0.01

ALERT_ROW = ("severity", "alertname", "run", "launch", "rank", "instance", "gpu")


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
    stat_panel("GPUs", f"sum({select(recorded.NODE_GPUS)})", Unit.NUMBER, empty="0").description(
        "How many GPUs does the driver reach on the selected nodes?"
    ),
    stat_panel(
        "Unhealthy GPUs", SICK_GPUS, Unit.COUNT, levels=levels.ANY_HAS_FAILED, empty="0"
    ).description(
        "How many GPUs are lost, or need a reset or a replacement? The dashboard GPU node "
        "shows which."
    ),
    stat_panel(
        "Alerts firing", f"count({FIRING}) or vector(0)", Unit.COUNT, levels=levels.ANY_IS_WRONG
    ).description("How many torchmem alerts are firing? They are listed below."),
    stat_panel(
        "OutOfMemoryErrors", OOMS_IN_RANGE, Unit.COUNT, levels=levels.ANY_IS_WRONG, empty="0"
    ).description(
        "How often did processes run out of memory within this time range, whether the "
        "script caught the errors or not? The dashboard After an OOM shows the ranks."
    ),
    stat_panel("Wasted GPU-hours", WASTED_GPU_HOURS, Unit.COUNT, empty="–")
    .description(
        "How much memory was unusable within this time range, in GPUs times hours? It counts "
        "idle GPUs whose memory is held, and memory stranded by fragmentation: half of the "
        "memory of a GPU for an hour is half a GPU-hour."
    )
    .decimals(1),
    stat_panel(
        "Empty GPU-hours",
        f"sum({fleet_report.hours(recorded.RUN_EMPTY_GPUS)}) or 0 * {WASTED_GPU_HOURS}",
        Unit.COUNT,
        empty="–",
    )
    .description(
        "For how many GPU-hours had Slurm or the kubelet given a GPU away, without a process on it "
        "for 10 minutes, within the time range?"
    )
    .decimals(1),
]


def _severity() -> str:
    """Return the place of each firing alert's severity in SEVERITIES, to sort by it."""
    places = (
        f"{place} * "
        + _alerts_of_torchmem(select(recorded.ALERTS, alertstate="firing", severity=severity))
        for place, severity in enumerate(SEVERITIES)
    )
    return row(ALERT_ROW, " or ".join(places))


def _alerts() -> Panel:
    ranked = {str(place): severity for place, severity in enumerate(SEVERITIES)}
    colors = {place: SEVERITIES[severity] for place, severity in ranked.items()}
    columns = [
        Column("Severity", _severity(), names=ranked, colors=colors, width=90, centered=True),
        Column("Alert", label="alertname", link=board.LINK_TO_RUNBOOK, width=240),
        Column("Run", label="run", link=board.LINK_TO_RANK),
        LAUNCH_OF_LINKS,
        Column("Rank", label="rank", width=60),
        Column("Node", label="instance", link=board.LINK_TO_NODE),
        Column("GPU", label="gpu", width=60),
        Column("Since", FIRING_SINCE_MILLISECONDS, unit=Unit.AGO, width=150),
    ]
    table = joined_table("Firing alerts", columns, sort="Severity", hidden=["severity"])
    table.description("What needs attention? A click on an alert opens its runbook.").no_value(
        "No alert is firing"
    )
    return table.span(16).height(7).min_width(80)


def _states() -> Panel:
    panel = stat_panel("Ranks by state", RANKS_BY_STATE, Unit.NUMBER, empty="No ranks")
    panel.description(
        "What state are the ranks in? A stalled rank is alive but has not finished a step for a "
        "while. Ended ranks count for 15 minutes."
    )
    return panel.span(8).height(7)


def _least_headroom() -> Panel:
    share, exhaustion = row(DEVICE_ROW, HEADROOM_SHARE), row(DEVICE_ROW, EXHAUSTION)
    listed = f"(bottomk({MAX_RANKS}, {share}) or {exhaustion})"
    columns = [
        Column("Run", label="run", link=board.LINK_TO_RANK),
        LAUNCH_OF_LINKS,
        Column("Rank", label="rank", width=50),
        Column("Node", label="instance", link=board.LINK_TO_NODE),
        _bar("Headroom", among(DEVICE_ROW, share, listed), levels.HEADROOM, width=95),
        Column("OOM in", exhaustion, unit=Unit.DURATION, levels=levels.EXHAUSTION, width=75),
        Column(
            "Why",
            among(DEVICE_ROW, row(DEVICE_ROW, reasons.judgments(), "threat"), listed),
            label="threat",
            names=reasons.NAMES,
            colors=reasons.COLORS,
            width=120,
        ),
    ]
    unseen = ("gpu", "pid")
    table = joined_table("Ranks with the least headroom", columns, sort="Headroom", hidden=unseen)
    table.description(
        f"Which rank will run out of memory first? The table lists the {MAX_RANKS} ranks with the "
        "least headroom, and all ranks for which an OOM is predicted, with the time until almost "
        "nothing will be left at the peak of their steps. Headroom is the largest tensor "
        "that would fit after the allocator has released its cache, as a share of the GPU; the "
        "lowest value of the last 5 minutes is used. Why is what the rank's page says first."
    ).no_value("No snapshot of any rank yet")
    return table.span(11).height(6).min_width(80)


def _bar(heading: str, query: str, bar_levels: levels.Levels, width: int) -> Column:
    return Column(heading, query, unit=Unit.RATIO, bar=True, levels=bar_levels, width=width)


def _wasteful() -> Panel:
    hours = row(GPU_ROW, f"topk({MAX_WASTEFUL}, {GPU_HOURS} > {MIN_WASTED_GPU_HOURS})")
    listed = some_gpus(hours)
    names = row(GPU_ROW, names_among(listed), "short_name")
    now = among(GPU_ROW, row(GPU_ROW, select(recorded.WASTED)), listed)
    idle = among(GPU_ROW, row(GPU_ROW, select(recorded.IDLE_HELD)), listed)
    holder = row(GPU_ROW, _largest_process(listed), "run", "user")
    columns = [
        Column("GPU", names, label="short_name", width=150),
        Column(
            "Now",
            idle,
            names={"0": "Fragmented", "1": "Idle"},
            colors={"0": PARTS["stranded"], "1": ATTENTION},
            width=100,
            centered=True,
        ),
        _bar("Wasted", now, levels.STRANDED, width=90),
        Column("GPU-hours", hours, unit=Unit.COUNT, decimals=2, width=110),
        Column("Run", holder, label="run"),
        Column("User", holder, label="user"),
    ]
    table = joined_table(
        "GPUs that waste most", columns, sort="GPU-hours", descending=True, hidden=GPU_ROW
    )
    table.description(
        "Which GPUs wasted most within the time range, why, and who holds their memory? A GPU "
        "whose memory is held while it is idle is wasted completely; of other GPUs, the stranded "
        "share is wasted. The process is the one with most memory."
    ).no_value("No GPU wastes memory")
    return table.span(13).height(6).min_width(60)


def _largest_process(gpus: str) -> str:
    """Return the process with most memory on each of some GPUs, with what is known about it."""
    facts = select(catalog.NVML_PROCESS_INFO)
    memory = among(("instance", "uuid"), select(catalog.NVML_PROCESS_MEMORY), gpus)
    largest = f"topk by (instance, uuid) (1, {memory})"
    return f"{facts} and on (instance, uuid, pid) {some_gpus(largest)}"


def _of_run(spec: MetricSpec) -> str:
    return row(RUN_ROW, select(spec))


def _ranks_in(states: str) -> str:
    """Return the ranks of each run in one of the states, which are separated by |."""
    ranks = append_matcher(select(recorded.NEWEST_STATE), f'state=~"{states}"')
    return f"count by (run, launch) ({ranks})"


def _runs() -> Panel:
    known, failed = _ranks_in(".*"), _ranks_in("failed|oom|killed")
    ooms = f"sum by (run, launch) ({ooms_in_range()})"
    retries = f"60 * {_of_run(recorded.RUN_RETRIES)}"
    columns = [
        Column("Run", label="run", link=board.LINK_TO_LAUNCH),
        Column("Launch", label="launch", width=130),
        Column("Alive", _ranks_in("running|stalled"), width=80),
        Column("Failed", f"{failed} or 0 * {known}", levels=levels.ANY_HAS_FAILED, width=80),
        Column("Fullest GPU", _of_run(recorded.RUN_RESERVED_MAX), unit=Unit.BYTES),
        Column("Least headroom", _of_run(recorded.RUN_HEADROOM), unit=Unit.BYTES),
        Column("Slack at peak", _of_run(recorded.RUN_SLACK), unit=Unit.RATIO, bar=True),
        Column("Imbalance", _of_run(recorded.RUN_IMBALANCE), levels=levels.IMBALANCE, decimals=2),
        Column(
            "Retries", retries, unit=Unit.PER_MINUTE, levels=levels.RETRIES_PER_MINUTE, decimals=1
        ),
        Column("OOMs", f"{ooms} or 0 * {known}", levels=levels.ANY_IS_WRONG, width=80),
        Column("Step", _of_run(recorded.RUN_STEP), unit=Unit.SECONDS),
    ]
    table = joined_table("Runs", columns, sort="Fullest GPU", descending=True)
    table.description(
        "How is each launch doing? Alive counts ranks that are running or stalled. Failed counts "
        "ranks that failed with an exception, ran out of memory, or were killed in the last 15 "
        "minutes. Fullest GPU: the most that one rank has reserved. Headroom is that of its worst "
        "rank. Slack: the share of the reserved memory "
        "that was not in use at the peak. Imbalance is the most loaded rank divided by the mean "
        "of the others. OOMs are those within the time range."
    ).no_value(NO_RUN)
    return table.height(6).min_width(80)


BOARD = board.Board(
    board.FLEET,
    "Fleet",
    "All nodes and runs: who is in trouble, which rank will run out of GPU memory first, and what "
    "is wasted. Needs an exporter on each node and the recording rules. Runs, headroom and lost "
    "GPU-hours need the SDK in the jobs, empty GPUs Slurm or the kubelet, and costs the exporter's "
    "setting gpu_hour_prices.",
    board.ALL_VARIABLES,
    (
        board.Row("Who is in trouble?", [*NUMBERS, _alerts(), _states()]),
        board.Row(
            "What runs out, and what is wasted?",
            [_least_headroom(), _wasteful(), _runs()],
        ),
        board.Row(fleet_report.TITLE, fleet_report.PANELS, collapsed=True),
        board.Row(fleet_costs.TITLE, fleet_costs.PANELS, collapsed=True),
        board.Row("Nodes", NODES, collapsed=True),
        board.Row("Over time", OVER_TIME, collapsed=True),
    ),
    (board.OOM_MARK,),
)
