"""The dashboard "After an OOM": which ranks ran out of memory, why, and what to do.

It also shows processes that have ended: the newest values within the time range.
"""

from __future__ import annotations

from dashboards import recorded
from dashboards.board import LINK_TO_RUN, OOM, OOM_MARK, TRAINING_VARIABLES, Board, Row
from dashboards.colors import ANY_IS_WRONG
from dashboards.panels import (
    PARTS_EXPLAINED,
    RANK,
    Column,
    Panel,
    Query,
    Text,
    Unit,
    joined_table,
    lines,
    memory_stack,
    stat_panel,
    state_timeline,
)
from dashboards.queries import (
    DEVICE_ROW,
    GPU_ROW,
    OOMS_IN_RANGE,
    OOMS_OF_PROCESSES,
    PROCESS,
    RANK_ROW,
    RETRIES_PER_MINUTE,
    among,
    append_matcher,
    row,
    seen,
    select,
    sum_without_pool,
)

from torchmem.allocator.remedies import REMEDY_BY_CAUSE
from torchmem.allocator.settings import LAST_PARSED
from torchmem.sample import catalog
from torchmem.sample.colors import CAUSES, STATES

NO_OOM = "No rank ran out of memory in this time range"

# The state timeline shows a state as its index here.
STATE_NUMBERS = ("running", "stalled", "exited", "failed", "oom", "killed")


def _state(states: str) -> str:
    """Return the last state of each process, as a label, on each of its devices."""
    state = append_matcher(seen(catalog.PROCESS_STATE), f'state=~"{states}"')
    devices = f"{seen(catalog.RESERVED_PEAK)} * 0"
    joined = f"{devices} + on ({', '.join(PROCESS)}) group_left (state) ({state} == 1)"
    return row(DEVICE_ROW, joined, "state")


_OOM_TIMES = row(DEVICE_ROW, seen(catalog.LAST_OOM_TIMESTAMP))
# Processes and devices with an OOM, and those that were killed.
FAILED_ROWS = f"({_OOM_TIMES} or {row(DEVICE_ROW, _state('oom|killed'))})"


def _of_failed_rows(expression: str) -> str:
    return among(DEVICE_ROW, row(DEVICE_ROW, expression), FAILED_ROWS)


def _with_oom(labels: tuple[str, ...]) -> str:
    """Return the label sets with an OOM within the range, the same at each point in time.

    So the lines of a rank also show the time before its OOM.
    """
    newest = f"last_over_time({select(catalog.LAST_OOM_TIMESTAMP, over='$__range')} @ end())"
    return f"max by ({', '.join(labels)}) ({newest})"


def _of_ooms(expression: str, labels: tuple[str, ...] = PROCESS) -> str:
    return among(labels, expression, _with_oom(labels))


_BY_CAUSE = f"sum by (cause) ({OOMS_OF_PROCESSES}) > 0"
_NEWEST = f"1000 * max({seen(catalog.LAST_OOM_TIMESTAMP)})"


def _ended(state: str) -> Query:
    return Query(f"count({seen(catalog.PROCESS_STATE, state=state)} == 1) or vector(0)")


NUMBERS: list[Panel] = [
    stat_panel(
        Text(
            "OutOfMemoryErrors",
            "How often did processes run out of memory within this time range, whether the "
            "script caught the errors or not? Processes that have ended count too.",
            NO_OOM,
        ),
        Query(OOMS_IN_RANGE),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "By cause",
            "Why did they run out of memory? capacity: the job is too large. fragmentation: "
            "enough memory was free, but not in one piece. limit: the memory fraction. "
            "external: other programs.",
            NO_OOM,
        ),
        Query(_BY_CAUSE, "{{cause}}"),
        Unit.COUNT,
    ).span(8),
    stat_panel(
        Text(
            "Ended by an OOM",
            "How many processes died of an OutOfMemoryError? A process that catches the error "
            "and continues is not counted.",
            NO_OOM,
        ),
        _ended("oom"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "Killed",
            "How many processes were ended by a signal? It may come from the kernel's OOM "
            "killer if the host's memory is full, the scheduler, or a user.",
            "None",
        ),
        _ended("killed"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text("Newest", "When was the newest OutOfMemoryError?", NO_OOM), Query(_NEWEST), Unit.AGO
    ),
]


def _failed() -> Panel:
    text = Text(
        "Ranks that ran out of memory or were killed",
        "Which ranks failed, how large was the request, what was free, and what helps? These are "
        "the last values of each process, kept as long as Prometheus retains them. If the stranded "
        "bytes are larger than the request, the cause is fragmentation. On the node, "
        "`torchmem oom` explains the same error in full.",
        NO_OOM,
    )
    causes = row(DEVICE_ROW, f"{seen(catalog.OOMS)} > 0", "cause")
    cause = f'label_join(topk by ({", ".join(DEVICE_ROW)}) (1, {causes}), "remedy", "", "cause")'
    # Of several lines within the range, that of the newest error.
    last_seen = f"max_over_time(timestamp({select(catalog.LAST_OOM_INFO)})[$__range:])"
    asked = f"topk by ({', '.join(DEVICE_ROW)}) (1, {row(DEVICE_ROW, last_seen, 'line')})"
    requested = row(DEVICE_ROW, seen(catalog.LAST_OOM_REQUESTED))
    time = row(DEVICE_ROW, f"1000 * {seen(catalog.LAST_OOM_TIMESTAMP)}")
    reserved = _of_failed_rows(f"sum without (pool) ({seen(catalog.RESERVED)})")
    free = _of_failed_rows(f"sum without (state) ({seen(catalog.FREE)})")
    stranded = _of_failed_rows(seen(catalog.FREE, state="stranded"))
    largest_block = _of_failed_rows(seen(catalog.LARGEST_FREE_BLOCK))
    fragmentation = _of_failed_rows(seen(catalog.FRAGMENTATION))
    columns = [
        Column("Run", label="run", link=LINK_TO_RUN),
        Column("Rank", label="rank", width=60),
        Column("Node", label="instance"),
        Column("GPU", label="gpu", width=60),
        Column("Pid", label="pid", width=80),
        Column("State", among(DEVICE_ROW, _state(".*"), FAILED_ROWS), label="state", colors=STATES),
        Column("When", time, unit=Unit.AGO),
        Column("Requested", requested, unit=Unit.BYTES),
        Column("Cause", cause, label="cause", colors=CAUSES),
        Column("Line", asked, label="line"),
        Column("Reserved", reserved, unit=Unit.BYTES),
        Column("Free in the cache", free, unit=Unit.BYTES),
        Column("Stranded part", stranded, unit=Unit.BYTES),
        Column("Largest free block", largest_block, unit=Unit.BYTES),
        Column("Fragmentation index", fragmentation, unit=Unit.RATIO, bar=True),
        Column("What to do", cause, label="remedy", names=REMEDY_BY_CAUSE),
    ]
    return joined_table(text, columns, sort="When", descending=True)


def _states() -> Panel:
    text = Text(
        "How the ranks ended",
        "Which rank stopped first, and did the others hang afterwards? There is one row per "
        "process. A row ends when the exporter drops the process, 15 minutes after its end.",
        "No rank matches the selection",
    )
    numbered = (
        f"{index} * ({select(catalog.PROCESS_STATE, state=state)} == 1)"
        for index, state in enumerate(STATE_NUMBERS)
    )
    query = Query(f"max without (state) ({' or '.join(numbered)})", f"{RANK} pid {{{{pid}}}}")
    names = {index: (state, STATES[state]) for index, state in enumerate(STATE_NUMBERS)}
    return state_timeline(text, query, names)


_HEADROOM = select(catalog.HEADROOM, flush="true")
BEFORE: list[Panel] = [
    lines(
        Text(
            "Allocated and reserved",
            "How much memory did the ranks hold before they ran out, and how much of it was in "
            "use? Only ranks with an OutOfMemoryError in this time range are shown.",
            NO_OOM,
        ),
        [
            Query(_of_ooms(sum_without_pool(catalog.ALLOCATED)), f"{RANK}, allocated"),
            Query(_of_ooms(sum_without_pool(catalog.RESERVED)), f"{RANK}, reserved"),
        ],
        Unit.BYTES,
    ),
    lines(
        Text(
            "Headroom and request",
            "Did headroom shrink slowly, or was one request too large? The panel shows the "
            "headroom after a flush and, from the error on, the requested size.",
            NO_OOM,
        ),
        [
            Query(_of_ooms(_HEADROOM), f"{RANK}, headroom"),
            Query(_of_ooms(select(catalog.LAST_OOM_REQUESTED)), f"{RANK}, requested"),
        ],
        Unit.BYTES,
    ),
    lines(
        Text(
            "Stranded",
            "Did fragmentation grow before the error? Stranded bytes are free bytes between "
            "live blocks.",
            NO_OOM,
        ),
        [Query(_of_ooms(select(catalog.FREE, state="stranded")), RANK)],
        Unit.BYTES,
    ),
    lines(
        Text(
            "Allocator retries",
            "Was there a warning? A retry flushes the whole cache; retries often begin minutes "
            "before the error. The panel shows them per minute.",
            NO_OOM,
        ),
        [Query(_of_ooms(RETRIES_PER_MINUTE), RANK)],
        Unit.PER_MINUTE,
    ),
    memory_stack(
        Text(
            "Memory of the GPUs that ran out",
            "Did something else use the memory? The panel adds up all GPUs on which a rank ran "
            f"out of memory. {PARTS_EXPLAINED}",
            NO_OOM,
        ),
        lambda part: f"sum({_of_ooms(select(recorded.PART, part=part), GPU_ROW)})",
        Query(f"sum({_of_ooms(select(recorded.TOTAL), GPU_ROW)})", "Device total"),
    ),
]


def _settings() -> Panel:
    text = Text(
        "Allocator settings of these ranks",
        "Which settings were in force? If expandable segments were already on, fragmentation needs "
        "another remedy.",
        NO_OOM,
    )
    names = {"expandable_segments": "Expandable segments", LAST_PARSED: "As last parsed"}
    query = row(RANK_ROW, _of_ooms(seen(catalog.ALLOCATOR_INFO)), *names)
    columns = [
        Column("Run", label="run"),
        Column("Rank", label="rank"),
        Column("Node", label="instance"),
        *(Column(heading, query, label=name) for name, heading in names.items()),
    ]
    return joined_table(text, columns)


BOARD = Board(
    OOM,
    "After an OOM",
    "Ranks that ran out of GPU memory in the selected time range: their last state, the cause, "
    "what was free, what led to the error, and what to do.",
    TRAINING_VARIABLES,
    (
        Row("What happened?", [*NUMBERS, _failed()]),
        Row("In what order?", [_states()]),
        Row("What led to it?", BEFORE),
        Row("Which settings were in force?", [_settings()]),
    ),
    (OOM_MARK,),
    since="now-6h",
)
