"""The row of the dashboard "Fleet" that shows what `torchmem fleet` reports, of the time range."""

from __future__ import annotations

from dashboards import recorded
from dashboards.board import LINK_TO_RUN
from dashboards.boards.oom import ONSET_NAMES
from dashboards.colors import ANY_IS_WRONG, Levels
from dashboards.panels import Column, Panel, Unit, joined_table, stat_panel
from dashboards.queries import WASTED_GPU_HOURS, select

from torchmem.fleet.report import MIN_FREE
from torchmem.metrics.catalog import MetricSpec
from torchmem.metrics.colors import CAUSES

TITLE = "What was lost, and what ended runs?"
OWNER_ROW = ("run", "user", "team")
OWNER = ("user", "team", "namespace")
HELD = "Held: GPUs of ranks. "
KINDS_EXPLAINED = (
    "Lost: ranks that waited for one that ran out of memory, or started again after it. Stranded: "
    "memory between tensors that no request fits into. Idle: memory held on a GPU without a kernel "
    "for 10 minutes. Empty: given away by Slurm or the kubelet, without a process for 10 minutes. "
    "Half of a GPU's memory for an hour is half a GPU-hour."
)
KINDS = {
    "Held": recorded.RUN_GPUS,
    "Lost": recorded.RUN_LOST_GPUS,
    "Stranded": recorded.RUN_STRANDED_GPUS,
    "Idle": recorded.RUN_IDLE_GPUS,
    "Empty": recorded.RUN_EMPTY_GPUS,
}
UNKNOWN = "–"
NO_RULES = "No run, or the rules of this version are not loaded"


def hours(spec: MetricSpec) -> str:
    """Return the GPUs of a series, added up over the time range: a value per minute."""
    return f"sum_over_time({select(spec)}[$__range:1m]) / 60"


def by_label(labels: tuple[str, ...], amounts: str) -> str:
    """Return amounts by label. What is unknown has a name, because Grafana merges other rows."""
    for label in labels:
        amounts = f'label_replace({amounts}, "{label}", "{UNKNOWN}", "{label}", "")'
    # VictoriaMetrics 1.79 mixes labels up if they are replaced after a sum has removed others.
    return f"sum by ({', '.join(labels)}) ({amounts})"


def _total(title: str, question: str, spec: MetricSpec, levels: Levels | None = None) -> Panel:
    panel = stat_panel(
        title,
        f"sum({hours(spec)}) or 0 * {WASTED_GPU_HOURS}",
        Unit.COUNT,
        levels=levels,
        empty="–",
    ).description(question)
    return panel.decimals(1).span(6)


def _columns(labels: tuple[str, ...]) -> list[Column]:
    return [
        Column(heading, by_label(labels, hours(spec)), unit=Unit.COUNT, decimals=2)
        for heading, spec in KINDS.items()
    ]


def _by_run() -> Panel:
    columns = [
        Column("Run", label="run", link=LINK_TO_RUN),
        Column("User", label="user"),
        Column("Team", label="team"),
        *_columns(OWNER_ROW),
    ]
    table = joined_table("GPU-hours by run", columns, sort="Held", descending=True)
    question = "What did each run cost within the time range?"
    table.description(f"{question} {HELD}{KINDS_EXPLAINED}").no_value(NO_RULES)
    return table.height(7).min_width(60)


def _by_owner() -> Panel:
    columns = [
        Column("User", label="user"),
        Column("Team", label="team"),
        Column("Namespace", label="namespace"),
        *_columns(OWNER),
    ]
    table = joined_table(
        "GPU-hours by user, team and namespace", columns, sort="Held", descending=True
    )
    table.description(
        f"Whose GPU memory was lost or unused within the time range? {HELD}{KINDS_EXPLAINED}"
    ).no_value(NO_RULES)
    return table.height(7).min_width(60)


def _ended() -> Panel:
    ends = f"last_over_time({select(recorded.OOM_END, over='$__range')})"
    query = f"count by (cause, onset, remedy) ({ends})"
    columns = [
        Column("Cause", query, label="cause", colors=CAUSES, width=115, centered=True),
        Column("Why now", query, label="onset", names=ONSET_NAMES, width=95),
        Column("Ranks", query, width=65),
        Column("What would have saved them", query, label="remedy", wrap=True),
    ]
    table = joined_table("OOMs that ended ranks, by cause", columns, sort="Ranks", descending=True)
    table.description(
        "Why did ranks die of an OutOfMemoryError within the time range, what had changed before, "
        "and what would have saved them?"
    ).no_value("No rank ran out of memory")
    return table.span(14).height(7).min_width(60)


def _room() -> Panel:
    need = _extreme("max", recorded.RUN_PEAK_NEED)
    total = _extreme("min", recorded.RUN_DEVICE_TOTAL)
    step = _extreme("max", recorded.RUN_STEP_PEAK)
    died = _of_user(f"last_over_time({select(recorded.OOM_END, over='$__range')})")

    def of_others(expression: str) -> str:
        return f"{expression} unless on (run, uid) {died}"

    factor = f"1 + ({1 - MIN_FREE:g} * {total} - {need}) / {step} >= 1"
    columns = [
        Column("Run", label="run", link=LINK_TO_RUN),
        Column("Needs", of_others(need), unit=Unit.BYTES),
        Column("Of the GPU", of_others(f"{need} / {total}"), unit=Unit.RATIO, bar=True),
        Column("Batch times", of_others(f"({factor})"), unit=Unit.COUNT, decimals=1),
    ]
    table = joined_table("Room at the peak", columns, sort="Of the GPU", hidden=("uid",))
    table.description(
        "Which runs would fit a smaller GPU or a larger batch? The need is that of the worst rank "
        "at its peak, without PyTorch's cache; runs that ran out of memory are not listed. The "
        f"batch could grow by this factor while {MIN_FREE:.0%} of the GPU stays free."
    ).no_value("No run")
    return table.span(10).height(7).min_width(60)


def _extreme(which: str, spec: MetricSpec) -> str:
    values = f"{which}_over_time({select(spec, over='$__range')})"
    return f"{which} by (run, uid) ({_of_user(values)})"


def _of_user(expression: str) -> str:
    """Add the label uid: a launch begins with the user's ID, and two users can have one run."""
    return f'label_replace({expression}, "uid", "$1", "launch", "(.*)-.*")'


PANELS: list[Panel] = [
    _total(
        "GPU-hours of ranks",
        "For how many GPU-hours did ranks hold GPUs within the time range?",
        recorded.RUN_GPUS,
    ),
    _total(
        "Lost to OOM restarts",
        "How many GPU-hours did ranks wait for one that ran out of memory, or start again after "
        "it, within the time range? What they repeat since the last checkpoint comes on top.",
        recorded.RUN_LOST_GPUS,
        ANY_IS_WRONG,
    ),
    _total(
        "Stranded GPU-hours",
        "How much memory of GPUs at work was stranded between tensors within the time range? Half "
        "of a GPU's memory for an hour is half a GPU-hour.",
        recorded.RUN_STRANDED_GPUS,
    ),
    _total(
        "Idle GPU-hours",
        "For how many GPU-hours was the memory of idle GPUs held within the time range?",
        recorded.RUN_IDLE_GPUS,
    ),
    _by_run(),
    _by_owner(),
    _ended(),
    _room(),
]
