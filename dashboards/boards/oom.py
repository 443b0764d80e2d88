"""The dashboard "After an OOM": which ranks ran out of memory, why, and what to do.

It also shows processes that have ended: the newest values within the time range.
"""

from __future__ import annotations

from dashboards import board, recorded
from dashboards import colors as levels
from dashboards.panels import (
    LAUNCH_OF_LINKS,
    NAME_WIDTH,
    PARTS_EXPLAINED,
    RANK,
    Column,
    Panel,
    Query,
    Unit,
    joined_table,
    lines,
    memory_stack,
    stat_panel,
    state_timeline,
    with_limit,
)
from dashboards.queries import (
    DEVICE_ROW,
    GPU_ROW,
    OOMS_IN_RANGE,
    PROCESS,
    RANK_ROW,
    RETRIES_PER_MINUTE,
    RUN_RANK,
    among,
    append_matcher,
    newest,
    of_ranks,
    ooms_in_range,
    row,
    seen,
    select,
    states,
    sum_without_pool,
    with_texts,
    worst,
)
from grafana_foundation_sdk.builders import timeseries

from torchmem.allocator.settings import LAST_PARSED
from torchmem.metrics import catalog
from torchmem.metrics.colors import CAUSES, STATES
from torchmem.node.published import KILL_CAUSES
from torchmem.sample.remedy_words import REMEDY_WORDS

NO_OOM = "No rank ran out of memory in this time range"
NO_VALUES = "No rank ran out of memory in this time range, or those that did sent no values"
NEWEST_RUN = "Of several runs, the one with the newest error is shown."

# Why memory ran out now, in two words.
ONSET_NAMES = {
    "first_step": "first step",
    "leak": "leak",
    "garbage": "garbage",
    "larger_step": "larger steps",
    "new_phase": "new phase",
    "outside": "outside",
    "stranded": "stranded",
    "tight": "no change",
}

# The state timeline shows a state as its index here.
STATE_NUMBERS = tuple(STATES)


def _state(names: str) -> str:
    """Return the last state of each process, as a label, on each of its devices."""
    state = append_matcher(seen(catalog.PROCESS_STATE), f'state=~"{names}"')
    return states(f"{seen(catalog.RESERVED_PEAK)} * 0", state)


_OOM_TIMES = row(DEVICE_ROW, seen(catalog.LAST_OOM_TIMESTAMP))
# Processes and devices with an OOM, and those that were killed.
FAILED_ROWS = f"({_OOM_TIMES} or {row(DEVICE_ROW, _state('oom|killed'))})"


def _of_failed_rows(expression: str) -> str:
    return among(DEVICE_ROW, row(DEVICE_ROW, expression), FAILED_ROWS)


# The time of the newest OOM of each series within the range, the same at each point in time, so
# that lines also show the time before it; and the run with the newest one.
_OOM = f"last_over_time({select(catalog.LAST_OOM_TIMESTAMP, over='$__range')} @ end())"
_NEWEST_RUN = f"topk(1, max by (run, launch) ({_OOM}))"
_OOM_OF_NEWEST_RUN = f"({_OOM} and on (run, launch) {_NEWEST_RUN})"


def _of_ooms(expression: str, labels: tuple[str, ...]) -> str:
    return among(labels, expression, f"max by ({', '.join(labels)}) {_OOM_OF_NEWEST_RUN}")


_FAILED_RANKS = f"max by (run, launch, rank) {_OOM_OF_NEWEST_RUN}"


def _lines(title: str, expression: str, unit: str, *, lowest: bool = False) -> timeseries.Panel:
    """Return one line per rank that ran out of memory, until its end; at most the worst ones."""
    ranks = of_ranks(expression, "min" if lowest else "max")
    query = Query(worst(ranks, lowest=lowest, only=_FAILED_RANKS), RANK)
    return lines(title, query, unit).height(10).no_value(NO_VALUES)


_NEWEST = f"1000 * max({seen(catalog.LAST_OOM_TIMESTAMP)})"


def _ended(state: str) -> Query:
    return Query(f"count({seen(catalog.PROCESS_STATE, state=state)} == 1) or vector(0)")


NUMBERS: list[Panel] = [
    stat_panel(
        "OutOfMemoryErrors", OOMS_IN_RANGE, Unit.NUMBER, levels=levels.ANY_HAS_FAILED, empty="None"
    ).description(
        "How often did processes run out of memory within this time range, whether the "
        "script caught the errors or not? Processes that have ended count too."
    ),
    stat_panel(
        "By cause",
        [
            Query(f"sum({ooms_in_range(cause=cause)}) > 0", cause, color)
            for cause, color in CAUSES.items()
        ],
        Unit.NUMBER,
        empty="None",
    )
    .description(
        "Why did they run out of memory? capacity: the run needed more than the GPU has. "
        "fragmentation: enough memory was free, but not in one piece. limit: the memory "
        "fraction. external: other programs. pending: a block waited for another stream. "
        "library: NCCL, cuBLAS or another library got no memory."
    )
    .span(8),
    stat_panel(
        "Ended by an OOM", _ended("oom"), Unit.NUMBER, levels=levels.ANY_HAS_FAILED, empty="None"
    ).description(
        "How many processes died of an OutOfMemoryError? A process that catches the error "
        "and continues is not counted."
    ),
    stat_panel(
        "Killed", _ended("killed"), Unit.NUMBER, levels=levels.ANY_IS_WRONG, empty="None"
    ).description(
        "How many processes were ended by a signal? It may come from the kernel's OOM "
        "killer if the host's memory is full, the scheduler, or a user."
    ),
    stat_panel("Newest", _NEWEST, Unit.AGO, empty="None").description(
        "When was the newest OutOfMemoryError?"
    ),
]


_OOM_MILLISECONDS = f"1000 * {seen(catalog.LAST_OOM_TIMESTAMP)}"
# A killed process has no event, but a last sample, which is the same on each of its devices.
_LAST_SAMPLE = (
    f"1000 * ({seen(catalog.SAMPLE_TIMESTAMP)} + on ({', '.join(PROCESS)}) group_right () "
    f"0 * {seen(catalog.RESERVED_PEAK)})"
)


# What killed a process, on each of its devices. It counts more than the errors that it survived.
KILLS: dict[str, str] = {cause: REMEDY_WORDS[cause] for cause in KILL_CAUSES}
_KILLED = with_texts(
    f"0 * {seen(catalog.RESERVED_PEAK)} + on ({', '.join(PROCESS)}) group_left (cause) "
    f"(1e10 * {seen(catalog.KILL_CAUSE)} > 0)",
    "remedy",
    "cause",
    KILLS,
)
# The newest of several errors within the range.
_LAST_SEEN = f"max_over_time(timestamp({select(catalog.LAST_OOM_INFO)})[$__range:10s])"
_LABELS = ("cause", "onset", "remedy", "line")
_ENDS = f"{row(DEVICE_ROW, _LAST_SEEN, *_LABELS)} or {row(DEVICE_ROW, _KILLED, *_LABELS)}"
_END = f"topk by ({', '.join(DEVICE_ROW)}) (1, {_ENDS})"
_TIME = f"({row(DEVICE_ROW, _OOM_MILLISECONDS)} or {_of_failed_rows(_LAST_SAMPLE)})"
_CAUSE_COLORS = {**CAUSES, **dict.fromkeys(KILLS, STATES["killed"])}
_STORY = board.link(
    board.OOM, "the time around this error", at="When", run="Run", launches="Launch", rank="Rank"
)
_RANK = board.link(
    board.TRAINING,
    "Training memory at this time",
    at="When",
    run="Run",
    launch="Launch",
    rank="Rank",
)


def _bytes(heading: str, query: str) -> Column:
    return Column(heading, query, unit=Unit.BYTES, width=74)


FAILED = (
    joined_table(
        "Ranks that ran out of memory or were killed",
        [
            Column("When", _TIME, unit=Unit.AGO, link=_STORY, width=110),
            Column("Run", label="run", width=NAME_WIDTH),
            LAUNCH_OF_LINKS,
            Column("Rank", label="rank", link=_RANK, width=50),
            Column(
                "State",
                among(DEVICE_ROW, _state(".*"), FAILED_ROWS),
                label="state",
                colors=STATES,
                width=62,
            ),
            Column("Cause", _END, label="cause", colors=_CAUSE_COLORS, width=107),
            Column("Why now", _END, label="onset", names=ONSET_NAMES, width=92),
            Column("What to do", _END, label="remedy", wrap=True),
            Column("Line", _END, label="line", width=NAME_WIDTH),
            _bytes("Request", row(DEVICE_ROW, seen(catalog.LAST_OOM_REQUESTED))),
            Column("GPU", label="gpu", width=50),
            Column("Node", label="instance", link=board.LINK_TO_NODE, width=NAME_WIDTH, wrap=True),
        ],
        sort="When",
        descending=True,
        hidden=("pid",),
    )
    .description(
        "Which ranks failed, why, and what helps? These are the last values of each process, kept "
        "as long as Prometheus retains them. The cause is the change that would have made "
        "enough room for the job. Why now is what had changed since it ran well: if something "
        "grew, look there first. The link in When opens this dashboard, and the link in Rank "
        "the dashboard Training memory, for the time around the error. On the node, "
        "`torchmem why` explains the same error in full."
    )
    .no_value(NO_OOM)
)

_LAST_REQUEST = f"last_over_time({select(catalog.LAST_OOM_REQUESTED, over='$__range')} @ end())"
_REQUESTED = f"max({_of_ooms(_LAST_REQUEST, ('run', 'rank'))})"
STORY: list[Panel] = [
    memory_stack(
        "Memory of the GPUs that ran out",
        lambda part: f"sum({_of_ooms(select(recorded.PART, part=part), GPU_ROW)})",
        Query(f"sum({_of_ooms(select(recorded.TOTAL), GPU_ROW)})", "GPUs of these ranks"),
    )
    .description(
        "Did something else use the memory? The panel adds up all GPUs on which a rank ran "
        f"out of memory. {NEWEST_RUN} {PARTS_EXPLAINED}"
    )
    .no_value(NO_OOM)
    .span(12),
    with_limit(
        _lines(
            "Headroom and request", select(catalog.HEADROOM, flush="true"), Unit.BYTES, lowest=True
        )
        .description(
            "Did headroom shrink slowly, or was one request too large? The headroom, after the "
            "allocator has released its cache, of the ranks that ran out of memory, and the "
            f"largest request that failed. {NEWEST_RUN}"
        )
        .no_value(NO_OOM),
        Query(_REQUESTED, "failed request"),
    ),
]


def _states() -> Panel:
    numbered = (
        f"{index} * ({select(catalog.PROCESS_STATE, state=state)} == 1)"
        for index, state in enumerate(STATE_NUMBERS)
    )
    of_newest = newest(f"max without (state) ({' or '.join(numbered)})")
    query = Query(
        f"max by (run, launch, rank) ({of_newest}) and on (run, launch) {_NEWEST_RUN}", RANK
    )
    names = {index: (state, STATES[state]) for index, state in enumerate(STATE_NUMBERS)}
    panel = state_timeline("How the ranks ended", query, names)
    panel.description(
        "Which rank stopped first, and did the others hang afterwards? One strip per rank; a "
        f"restart continues it. An ended process is shown for 15 minutes. {NEWEST_RUN}"
    ).no_value("No rank ran out of memory")
    return panel


BEFORE: list[Panel] = [
    _lines("Reserved", sum_without_pool(catalog.RESERVED), Unit.BYTES).description(
        "How much memory did PyTorch hold before the ranks ran out? Only ranks with an "
        f"OutOfMemoryError in this time range are shown. {NEWEST_RUN}"
    ),
    _lines("Allocated", sum_without_pool(catalog.ALLOCATED), Unit.BYTES).description(
        "How much of it did tensors occupy between steps? A line that rises is a leak or "
        "longer inputs."
    ),
    _lines("Stranded", select(catalog.FREE, state="stranded"), Unit.BYTES).description(
        "Did fragmentation grow before the error? Stranded bytes are free bytes between "
        "live blocks."
    ),
    _lines("Allocator retries", RETRIES_PER_MINUTE, Unit.PER_MINUTE).description(
        "Was there a warning? A retry flushes the whole cache; retries often begin minutes "
        "before the error."
    ),
]


def _settings() -> Panel:
    names = {"expandable_segments": "Expandable segments", LAST_PARSED: "As last parsed"}
    query = row(RANK_ROW, _of_ooms(seen(catalog.ALLOCATOR_INFO), RUN_RANK), *names)
    columns = [
        Column("Run", label="run"),
        Column("Rank", label="rank", width=60),
        Column("Node", label="instance"),
        *(Column(heading, query, label=name) for name, heading in names.items()),
    ]
    table = joined_table("Allocator settings of these ranks", columns, hidden=("launch",))
    table.description(
        "Which settings were in effect? If expandable segments were already on, fragmentation "
        "needs another remedy."
    ).no_value(NO_OOM)
    return table.height(7)


BOARD = board.Board(
    board.OOM,
    "After an OOM",
    "Ranks that ran out of GPU memory in the selected time range: their last state, the cause, "
    "what to do, what was free, and what led to the error. Needs the SDK in the job, an "
    "exporter on its node and the recording rules. It knows what Prometheus still has; "
    "`torchmem why` on the node says more.",
    board.TRAINING_VARIABLES,
    (
        board.Row("What happened, and what helps?", [*NUMBERS, FAILED]),
        board.Row("What led to it?", STORY),
        board.Row("In what order did the ranks end?", [_states()], collapsed=True),
        board.Row("How did memory develop?", BEFORE, collapsed=True),
        board.Row("Which settings were in effect?", [_settings()], collapsed=True),
    ),
    (board.OOM_MARK, board.START_MARK, board.END_MARK),
)
