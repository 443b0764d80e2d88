"""The dashboard "Training memory": will the run out of memory, when, why, and what to set."""

from __future__ import annotations

from collections.abc import Mapping

from dashboards import board, reasons, recorded
from dashboards import colors as levels
from dashboards.boards import run_comparison, training_memory, training_serving, training_speed
from dashboards.panels import (
    LAUNCH_OF_LINKS,
    NAME_WIDTH,
    PARTS_EXPLAINED,
    RANK,
    RANKS_BY_STATE,
    Column,
    Panel,
    Query,
    Unit,
    joined_table,
    memory_stack,
    stat_panel,
)
from dashboards.queries import (
    DEVICE_ROW,
    GPU_ROW,
    HEADROOM,
    HEADROOM_SHARE,
    LAST_OOM_MILLISECONDS,
    MAX_LINES,
    OOMS_IN_RANGE,
    PROCESS,
    RANK_ROW,
    RETRIES_IN_10_MINUTES,
    STRANDED_SHARE,
    among,
    append_matcher,
    live,
    newest,
    row,
    select,
    states,
)

from torchmem.allocator.settings import LAST_PARSED
from torchmem.manifests import prediction
from torchmem.metrics import catalog
from torchmem.metrics.colors import STATES

NO_SNAPSHOT = "No snapshot yet"

NUMBERS: list[Panel] = [
    stat_panel("Ranks", RANKS_BY_STATE, Unit.NUMBER, empty="No rank").description(
        "What state are the ranks in? A stalled rank is alive but has not finished a step for "
        "a while. failed: an uncaught exception or an exit code ended the process. oom and "
        "killed: it ended that way. A rank that was restarted counts once; an ended rank is "
        "shown for 15 minutes."
    ),
    stat_panel(
        "Out of memory in",
        Query(f"bottomk(1, {reasons.seconds_left()})", RANK),
        Unit.DURATION,
        levels=levels.EXHAUSTION,
        empty="No time known",
    )
    .description(
        "When will a rank run out of memory? The time until almost nothing will be left at the "
        "peak of its steps, under the conditions of the alert TorchmemOutOfMemoryPredicted, or "
        "until what the rank judges to grow has filled its GPU. The time is unknown for "
        "a rank that is fragmented or full; the table below says so. "
        f"{prediction.worth()}"
    )
    .decimals(0),
    stat_panel(
        "Least headroom",
        Query(f"bottomk(1, {HEADROOM_SHARE})", RANK),
        Unit.RATIO,
        levels=levels.HEADROOM,
        empty=NO_SNAPSHOT,
    ).description(
        "How large a tensor could the rank with the least headroom still allocate, as a share "
        "of its GPU, after the allocator has released its cache? A larger request raises "
        "OutOfMemoryError. The lowest value of the last 5 minutes is used, as in Fleet and in "
        "the alerts."
    ),
    stat_panel(
        "Most stranded",
        Query(f"topk(1, {STRANDED_SHARE})", RANK),
        Unit.RATIO,
        levels=levels.STRANDED,
        empty=NO_SNAPSHOT,
    ).description(
        "How much of its GPU does the worst rank lose to fragmentation: memory that is free, "
        "but pinned between live blocks? Orange above the threshold of the warning, red above "
        "the threshold of the critical alert."
    ),
    stat_panel(
        "Retries in 10 min",
        RETRIES_IN_10_MINUTES,
        Unit.COUNT,
        levels=levels.ANY_IS_WRONG,
        empty="None",
    ).description(
        "How often did the allocators release their whole cache to serve a request? Each retry "
        "synchronizes all streams; a healthy job has none after its first steps. Processes "
        "that have ended count too."
    ),
    stat_panel(
        "OutOfMemoryErrors", OOMS_IN_RANGE, Unit.COUNT, levels=levels.ANY_HAS_FAILED, empty="None"
    ).description(
        "How often did processes run out of memory within this time range, whether the script "
        "caught the errors or not? Processes that have ended count too. The dashboard After an "
        "OOM explains them."
    ),
]

ALERT_NAMES = {alert: alert.removeprefix("Torchmem") for alert in reasons.ALERTS}
ALERT_NAMES |= {"README": "none"}


def _states(names: str) -> str:
    """Return the state of the newest process of each rank, as a label, on each of its devices."""
    state = append_matcher(select(catalog.PROCESS_STATE), f'state=~"{names}"')
    return states(f"({newest(select(catalog.RESERVED_PEAK))} * 0)", state)


_SHARE = row(DEVICE_ROW, HEADROOM_SHARE)
_SOON = f"bottomk({MAX_LINES}, {row(DEVICE_ROW, reasons.seconds_left())})"
_LEAST = f"bottomk({MAX_LINES}, {_SHARE})"
_ENDED = _states("oom|killed|failed")
_THREATENED = f"topk({MAX_LINES}, {reasons.threatened()})"
_LISTED = f"({row(DEVICE_ROW, f'{_LEAST} or {_SOON} or {_ENDED} or {_THREATENED}')})"


def _labels_of_listed(expression: str, nothing: Mapping[str, str]) -> str:
    """Return labels of the ranks in the table; those without them have the values in `nothing`.

    Each of them then has these columns, also for the links in them.
    """
    found, rest = (
        among(DEVICE_ROW, row(DEVICE_ROW, expression, *nothing), _LISTED),
        f"0 * {_LISTED}",
    )
    for label, none in nothing.items():
        rest = f'label_replace({rest}, "{label}", "{none}", "", "")'
    return f"{found} or on (run, launch, rank) {rest}"


_WHY = _labels_of_listed(reasons.reasons(), {"threat": "none", "remedy": "–"})
_ALERT = _labels_of_listed(reasons.alerts(), {"alertname": "README"})


def _listed(expression: str) -> str:
    return among(DEVICE_ROW, row(DEVICE_ROW, expression), _LISTED)


_GROWTH = select(catalog.GROWTH)
STRANDED = live(select(catalog.FREE, state="stranded"))


def _share(heading: str, query: str, colored: levels.Levels) -> Column:
    return Column(heading, query, unit=Unit.RATIO, bar=True, levels=colored, width=88)


DANGER = (
    joined_table(
        "Ranks with the least headroom",
        [
            Column("Rank", label="rank", width=50),
            Column(
                "State",
                among(DEVICE_ROW, _states(".*"), _LISTED),
                label="state",
                colors=STATES,
                width=64,
            ),
            Column("Headroom", _listed(HEADROOM), unit=Unit.BYTES, width=82),
            _share("Of the GPU", _listed(HEADROOM_SHARE), levels.HEADROOM),
            Column("Stranded", _listed(STRANDED), unit=Unit.BYTES, width=74),
            Column("Growth", _listed(_GROWTH), unit=Unit.BYTES, width=70),
            Column("OOM in", _SOON, unit=Unit.DURATION, levels=levels.EXHAUSTION, width=84),
            Column(
                "Why", _WHY, label="threat", names=reasons.NAMES, colors=reasons.COLORS, width=120
            ),
            Column("What to do", _WHY, label="remedy", wrap=True),
            Column(
                "Alert",
                _ALERT,
                label="alertname",
                names=ALERT_NAMES,
                link=board.LINK_TO_RUNBOOK,
                width=165,
            ),
            Column("GPU", label="gpu", width=50),
            Column("Node", label="instance", link=board.LINK_TO_NODE, width=142, wrap=True),
        ],
        sort="Of the GPU",
        hidden=("run", "launch", "pid"),
    )
    .description(
        f"Which ranks will run out of memory, why, and what helps? The {MAX_LINES} ranks with the "
        "least headroom, healthy or not, those that will run out of memory soonest, those that "
        "something threatens, and those that have failed. Headroom is the largest tensor that "
        "would still fit, stranded what is free between live blocks. Growth is what the rank "
        "has found to grow in each step: tensors kept between steps, what a step needs, or memory "
        "outside the allocator. The reason is what its page and `torchmem why` say first; if "
        "nothing threatens the rank now, it is what did most often within 5 minutes. Of a rank "
        "that has ended, it comes from its alert. An alert links to its runbook."
    )
    .no_value("No rank of this run publishes samples")
)


def _of_gpus(spec: catalog.MetricSpec, **fixed: str) -> str:
    """Return the sum over the GPUs that the ranks have used."""
    return f"sum({among(('job', *GPU_ROW), select(spec, **fixed), select(catalog.RESERVED_PEAK))})"


ANSWER: list[Panel] = [
    *NUMBERS,
    DANGER,
    memory_stack(
        "Where the memory is",
        lambda part: _of_gpus(recorded.PART, part=part),
        Query(_of_gpus(recorded.TOTAL), "GPUs of the run"),
    )
    .description(
        "What is the memory of the run's GPUs used for? The areas add up to the dashed line. "
        f"{PARTS_EXPLAINED}"
    )
    .no_value("No data: no GPU matches the selection")
    .span(12)
    .height(12),
    training_memory.HEADROOM_LINES,
]


def _facts() -> str:
    """Return the Slurm job and the pod of each process, on each of its devices."""
    joined = (
        f"{select(catalog.RESERVED_PEAK)} * 0 + on ({', '.join(PROCESS)}) "
        f"group_left ({', '.join(board.SCHEDULED)}) {select(catalog.PROCESS_INFO)}"
    )
    return row(DEVICE_ROW, joined, *board.SCHEDULED)


def _processes() -> Panel:

    def of_device(spec: catalog.MetricSpec, **fixed: str) -> str:
        return row(DEVICE_ROW, select(spec, **fixed))

    newest_oom = row(DEVICE_ROW, LAST_OOM_MILLISECONDS)
    state = states(f"{select(catalog.RESERVED_PEAK)} * 0", select(catalog.PROCESS_STATE))
    columns = [
        Column("Rank", label="rank", width=60),
        LAUNCH_OF_LINKS,
        Column("State", state, label="state", colors=STATES, width=80),
        Column("Node", label="instance", link=board.LINK_TO_NODE, width=NAME_WIDTH, wrap=True),
        Column("GPU", label="gpu", width=50),
        Column("Pid", label="pid", width=80),
        *board.scheduled(_facts()),
        Column("Active peak", of_device(catalog.ACTIVE_PEAK), unit=Unit.BYTES),
        Column("Reserved peak", of_device(catalog.RESERVED_PEAK), unit=Unit.BYTES),
        Column("Slack at peak", of_device(recorded.PEAK_SLACK), unit=Unit.RATIO, bar=True),
        Column("Stranded", of_device(catalog.FREE, state="stranded"), unit=Unit.BYTES),
        Column(
            "Newest OOM",
            newest_oom,
            unit=Unit.AGO,
            link=board.link(
                board.OOM, "After an OOM", at="Newest OOM", launches="Launch", rank="Rank"
            ),
        ),
        Column("Requested", of_device(catalog.LAST_OOM_REQUESTED), unit=Unit.BYTES),
    ]
    table = joined_table("Processes", columns, sort="Rank", hidden=("run",))
    table.description(
        "How much memory did each process need, and how much was lost? Every process on every GPU; "
        "ended processes stay for 15 minutes with their last values. The active peak is what the "
        "job needed, the reserved peak what PyTorch took for it."
    )
    return table.min_width(80)


_NAMES = {
    "expandable_segments": "Expandable segments",
    "max_split_size": "Largest block to split",
    "garbage_collection_threshold": "Garbage collection threshold",
    LAST_PARSED: "As last parsed",
}
_IN_FORCE = row(RANK_ROW, newest(select(catalog.ALLOCATOR_INFO)), *_NAMES)
_IGNORED = row(RANK_ROW, f"{select(catalog.SETTING_IGNORED)} == 1", "setting")
SETTINGS = (
    joined_table(
        "Allocator settings",
        [
            Column("Rank", label="rank", width=60),
            Column("Node", label="instance", width=NAME_WIDTH, wrap=True),
            *(Column(heading, _IN_FORCE, label=name) for name, heading in _NAMES.items()),
            Column("Ignored by PyTorch", _IGNORED, label="setting"),
        ],
        sort="Rank",
        hidden=("run", "launch"),
    )
    .description(
        "Which settings does the allocator use? These are the settings that PyTorch applied, which "
        "can differ from the environment variable. The ranks of one run should have the same ones. "
        "The last column has a setting that was not applied: this version of PyTorch uses another "
        "name for it, or it was set after CUDA was initialized."
    )
    .no_value("PyTorch reports its settings from version 2.1 on, and after CUDA is initialized")
)

BOARD = board.Board(
    board.TRAINING,
    "Training memory",
    "The GPU memory of one training run, rank by rank: will it run out, when, why, and what to do. "
    "Needs the SDK in the job, an exporter on its node and the recording rules. Memory outside the "
    "allocator needs an exporter that sees the node's processes, and KV cache in use a scrape of "
    "vLLM or SGLang. It shows the newest launch of its run, unless you select others.",
    (*board.ONE_RUN_VARIABLES, board.COMPARE, board.CHOSEN_LAUNCHES, board.SHOWN_RANKS),
    (
        board.Row("Will it run out of memory?", ANSWER),
        board.Row("Where is the memory?", training_memory.MEMORY, collapsed=True),
        board.Row("Is it fragmented?", training_memory.FRAGMENTATION, collapsed=True),
        board.Row("Does it grow?", training_memory.GROWTH, collapsed=True),
        board.Row("Is training slow because of memory?", training_speed.PANELS, collapsed=True),
        board.Row("Is the host out of memory?", training_memory.HOST, collapsed=True),
        board.Row("Phases, CUDA graphs and MemPools", training_memory.SPECIAL, collapsed=True),
        board.Row(
            "Serving: is the engine's memory right?", training_serving.PANELS, collapsed=True
        ),
        board.Row("Processes and settings", [_processes(), SETTINGS], collapsed=True),
        board.Row("Compared with another run", run_comparison.PANELS, collapsed=True),
    ),
    board.MARKS_OF_RANKS,
)
