"""The dashboard "Training memory": which rank runs out of memory, and where the memory went."""

from __future__ import annotations

from dashboards import recorded
from dashboards.board import COMPARE, OOM, OOM_MARK, TRAINING, TRAINING_VARIABLES, Board, Row, link
from dashboards.boards import run_comparison, training_memory
from dashboards.colors import ANY_IS_WRONG, STRANDED
from dashboards.panels import (
    RANK,
    RANKS_BY_STATE,
    Column,
    Panel,
    Query,
    Text,
    Unit,
    joined_table,
    lines,
    stat_panel,
)
from dashboards.queries import (
    DEVICE_ROW,
    LAST_OOM_MILLISECONDS,
    OOMS_IN_RANGE,
    PROCESS,
    RANK_ROW,
    RETRIES_PER_MINUTE,
    live,
    rate,
    row,
    select,
)

from torchmem.allocator.settings import LAST_PARSED
from torchmem.sample import catalog
from torchmem.sample.colors import STATES

NO_SNAPSHOT = "No snapshot yet"

OVERVIEW: list[Panel] = [
    stat_panel(
        Text(
            "Ranks by state",
            "What state are the training processes in? A stalled rank is alive but has not "
            "finished a step for a while. failed: an uncaught exception ended the process. oom and "
            "killed: it ended that way, or its newest step ran out of memory. Shown for 15 minutes "
            "after the end.",
            "No ranks",
        ),
        RANKS_BY_STATE,
        Unit.COUNT,
    ),
    stat_panel(
        Text(
            "Out of memory",
            "How often did processes raise OutOfMemoryError within the selected time range, "
            "caught by the script or not? Processes that have ended count too.",
        ),
        Query(OOMS_IN_RANGE),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "Least headroom",
            "How large a tensor could the rank with the least headroom still allocate, after "
            "the allocator has released its cache? A larger request raises OutOfMemoryError. "
            "The lowest value of the last 5 minutes is used, as in Fleet and in the alerts.",
            NO_SNAPSHOT,
        ),
        Query(f"bottomk(1, {select(recorded.MIN_HEADROOM)})", RANK),
        Unit.BYTES,
    ),
    stat_panel(
        Text(
            "First out of memory in",
            "When will the first rank run out of memory, if headroom keeps falling as in the "
            "last 15 minutes? Without a value, no rank's headroom is falling.",
            "Not falling",
        ),
        Query(f"bottomk(1, {select(recorded.EXHAUSTION)})", RANK),
        Unit.SECONDS,
    ),
    stat_panel(
        Text(
            "Most stranded",
            "How much of its device does the worst rank lose to fragmentation: memory that is "
            "free, but pinned between live blocks? From 5 % on, act if there are retries too.",
            NO_SNAPSHOT,
        ),
        Query(f"topk(1, {live(select(recorded.STRANDED_RATIO))})", RANK),
        Unit.RATIO,
        levels=STRANDED,
    ),
    stat_panel(
        Text(
            "Retries in 10 minutes",
            "How often did the allocators release their whole cache to serve a request? Each "
            "retry synchronizes all streams; a healthy job has none after its first steps. "
            "Processes that have ended count too.",
        ),
        Query(f"sum({select(recorded.RETRIES_10M)})"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
]

_HEADROOM = {flush: live(select(catalog.HEADROOM, flush=flush)) for flush in ("false", "true")}
_SECONDS, _COUNT = (rate(select(catalog.STEP_DURATION, part)) for part in ("_sum", "_count"))
_BUCKETS = rate(select(catalog.STEP_DURATION, "_bucket"))
# The comparison drops NaN, which is the quantile while no step ends.
_SLOWEST = f"histogram_quantile(0.95, sum by (run, le) ({_BUCKETS})) >= 0"
PRESSURE: list[Panel] = [
    lines(
        Text(
            "Headroom",
            "How large a tensor would still fit in each rank, immediately and after the "
            "allocator has released its cache? Both are from snapshots at random moments of a "
            "step. The lowest value of 5 minutes is close to the headroom at the peak; it is "
            "the headroom of the tables, the numbers and the alerts.",
            NO_SNAPSHOT,
        ),
        [
            Query(_HEADROOM["false"], f"{RANK}, immediately"),
            Query(_HEADROOM["true"], f"{RANK}, after a flush"),
            Query(select(recorded.MIN_HEADROOM), f"{RANK}, lowest of 5 minutes"),
        ],
        Unit.BYTES,
    ),
    lines(
        Text(
            "Headroom exhausted in",
            "When will each rank run out of memory, at the trend of its last 15 minutes? Take "
            "a line that falls steadily seriously; a line that jumps is noise. A rank without "
            "a line has no falling headroom.",
            "Headroom is not falling",
        ),
        [Query(select(recorded.EXHAUSTION), RANK)],
        Unit.SECONDS,
    ),
    lines(
        Text(
            "Allocator retries",
            "How often per minute does each rank flush its whole cache? Retries slow down "
            "every step and often come before an OutOfMemoryError.",
        ),
        [Query(RETRIES_PER_MINUTE, RANK)],
        Unit.PER_MINUTE,
    ),
    lines(
        Text(
            "Step duration",
            "Are steps getting slower? The time between the ends of two optimizer steps: the "
            "mean of each rank, and the 95th percentile of the whole run. It rises together "
            "with retries.",
            "No optimizer step yet",
        ),
        [
            Query(f"{_SECONDS} / ({_COUNT} > 0)", RANK),
            Query(_SLOWEST, "{{run}} slowest 5 %", "text"),
        ],
        Unit.SECONDS,
    ),
    lines(
        Text(
            "Calls to the driver",
            "Does the allocator still request memory from the driver, or return it? After the "
            "first steps it should not: each call is slow, and a constant rate means that sizes "
            "vary or that something empties the cache. Before it returns memory, it waits for "
            "all streams.",
        ),
        [
            Query(f"60 * {rate(select(catalog.DEVICE_ALLOCS))}", f"{RANK}, segments allocated"),
            Query(f"60 * {rate(select(catalog.DEVICE_FREES))}", f"{RANK}, segments returned"),
            Query(f"60 * {rate(select(catalog.STREAM_SYNCS))}", f"{RANK}, waits for streams"),
        ],
        Unit.PER_MINUTE,
    ),
    lines(
        Text(
            "Samples per second",
            "How fast does the run train, and did it slow down? The script reports the samples "
            "with session.step(samples=...).",
            "The script reports no samples",
        ),
        [Query(f"sum by (run) ({rate(select(catalog.SAMPLES))})", "{{run}}")],
        Unit.NUMBER,
    ),
    lines(
        Text(
            "OutOfMemoryErrors since the start",
            "Which ranks ran out of memory, and why? Errors since the process started, by "
            "cause. capacity: the job is too large. fragmentation: enough memory was free, but "
            "not in one piece. limit: the memory fraction. external: other programs.",
            "No OutOfMemoryError",
        ),
        [Query(f"{select(catalog.OOMS)} > 0", f"{RANK}: {{{{cause}}}}")],
        Unit.COUNT,
    ).span(24),
]

RANK_COLUMNS = (
    Column("Run", label="run"),
    Column("Rank", label="rank", width=70),
    Column("Node", label="instance"),
)


def _ranks() -> Panel:
    text = Text(
        "Ranks",
        "How much memory did each process need, and how much was lost? The table lists every "
        "process on every GPU; ended processes stay for 15 minutes with their last values. The "
        "active peak is what the job needed, the reserved peak what PyTorch took for it.",
    )
    ooms = row(DEVICE_ROW, f"{select(catalog.OOMS)} > 0", "cause")
    cause = f"topk by ({', '.join(DEVICE_ROW)}) (1, {ooms})"
    link_to_oom = link(OOM, "After an OOM", run="Run")

    def of_device(spec: catalog.MetricSpec, **fixed: str) -> str:
        return row(DEVICE_ROW, select(spec, **fixed))

    columns = [
        *RANK_COLUMNS,
        Column("GPU", label="gpu", width=60),
        Column("Pid", label="pid", width=90),
        Column("State", _state_of_devices(), label="state", colors=STATES),
        Column("Active peak", of_device(catalog.ACTIVE_PEAK), unit=Unit.BYTES),
        Column("Reserved peak", of_device(catalog.RESERVED_PEAK), unit=Unit.BYTES),
        Column("Slack at peak", of_device(recorded.PEAK_SLACK), unit=Unit.RATIO, bar=True),
        Column("Stranded", of_device(catalog.FREE, state="stranded"), unit=Unit.BYTES),
        Column(
            "Newest OOM", row(DEVICE_ROW, LAST_OOM_MILLISECONDS), unit=Unit.AGO, link=link_to_oom
        ),
        Column("OOM request", of_device(catalog.LAST_OOM_REQUESTED), unit=Unit.BYTES),
        Column("OOM cause", cause, label="cause"),
    ]
    return joined_table(text, columns)


def _state_of_devices() -> str:
    """Return the state of each process, as a label, on each of its devices."""
    devices = f"{select(catalog.RESERVED_PEAK)} * 0"
    state = f"({select(catalog.PROCESS_STATE)} == 1)"
    joined = f"{devices} + on ({', '.join(PROCESS)}) group_left (state) {state}"
    return row(DEVICE_ROW, joined, "state")


_NAMES = {
    "expandable_segments": "Expandable segments",
    "max_split_size": "Largest block to split",
    "garbage_collection_threshold": "Garbage collection threshold",
    LAST_PARSED: "As last parsed",
}
_IN_FORCE = row(RANK_ROW, select(catalog.ALLOCATOR_INFO), *_NAMES)
_IGNORED = row(RANK_ROW, f"{select(catalog.SETTING_IGNORED)} == 1", "setting")
SETTINGS: list[Panel] = [
    joined_table(
        Text(
            "Allocator settings in force",
            "Which settings does the allocator use? These are the settings that PyTorch "
            "applied, which can differ from the environment variable. The ranks of one run "
            "should have the same settings.",
            "PyTorch reports its settings from version 2.1 on, and after CUDA is initialized",
        ),
        [
            *RANK_COLUMNS,
            *(Column(heading, _IN_FORCE, label=name) for name, heading in _NAMES.items()),
        ],
    ).span(16),
    joined_table(
        Text(
            "Settings that PyTorch ignored",
            "Which settings of PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF were not applied? "
            "This version of PyTorch uses another name, or the setting was made after CUDA was "
            "initialized.",
            "None: all settings are in force",
        ),
        [*RANK_COLUMNS, Column("Setting", _IGNORED, label="setting")],
    ).span(8),
]

BOARD = Board(
    TRAINING,
    "Training memory",
    "GPU memory of PyTorch training, per rank and per GPU: what the allocator holds, what it "
    "cannot use, and how much headroom is left.",
    (*TRAINING_VARIABLES, COMPARE),
    (
        Row("Will it run out of memory?", OVERVIEW),
        Row("Where is the memory?", training_memory.MEMORY),
        Row("Fragmentation", training_memory.FRAGMENTATION),
        Row("Memory pressure", PRESSURE),
        Row("Ranks and settings", [_ranks(), *SETTINGS]),
        Row("Comparison of two runs", run_comparison.PANELS),
    ),
    (OOM_MARK,),
)
