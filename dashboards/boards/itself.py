"""The dashboard "torchmem itself": whether the monitoring works, and what it costs."""

from __future__ import annotations

from dashboards import recorded
from dashboards.board import ALL_VARIABLES, ITSELF, LINK_TO_NODE, Board, Row
from dashboards.colors import ANY_HAS_FAILED, ANY_IS_WRONG, SDK_COST, Levels
from dashboards.panels import (
    RUN_RANK,
    Column,
    Panel,
    Query,
    Unit,
    joined_table,
    lines,
    stat_panel,
    state_timeline,
)
from dashboards.queries import live, of_ranks, prepend_matcher, rate, row, select, worst
from grafana_foundation_sdk.builders import stat, timeseries

from torchmem.metrics import catalog
from torchmem.metrics.catalog import MetricSpec
from torchmem.metrics.colors import ATTENTION, FAILED, GOOD

NO_EXPORTER = "Prometheus scrapes no exporter with job torchmem"
NO_EXPORTERS = "No exporter"
NO_RANK = "No rank matches the selection"

NODE_ROW = ("instance",)
SDK_CORES = live(rate(select(catalog.SDK_CPU)))
PROBLEM_ROW = ("what", "detail", "instance", "run", "rank")
NOTHING_IS_WRONG = "Nothing is wrong"


def _scraped(spec: MetricSpec) -> str:
    return prepend_matcher(select(spec), 'job="torchmem"')


def _new(spec: MetricSpec) -> str:
    """Return by how much a counter rose within the time range."""
    return f"round(increase({select(spec, over='$__range')}))"


EXPORTERS_KNOWN = _scraped(recorded.UP)
DOWN = f"{EXPORTERS_KNOWN} == 0"
NVML_DOWN = f"{select(catalog.NVML_UP)} == 0"
# Without NVML all collectors of GPUs fail, which is one problem.
COLLECTORS_FAILED = f"{select(catalog.COLLECTOR_SUCCESS)} == 0 unless on (instance) ({NVML_DOWN})"
REJECTED = _new(catalog.REJECTED_SAMPLES)
SDK_ERRORS = _new(catalog.SDK_ERRORS)
# A stage has no series before its first error, so `increase` would miss that one.
_STAGE_ERRORS = f"max_over_time({select(catalog.SDK_STAGE_ERRORS, over='$__range')})"
SDK_STAGE_ERRORS = (
    f"({_STAGE_ERRORS} - {select(catalog.SDK_STAGE_ERRORS)} offset $__range or {_STAGE_ERRORS})"
)
HOOKS_DROPPED = _new(catalog.HOOKS_DROPPED)


def _count(title: str, of: str, levels: Levels = ANY_IS_WRONG) -> stat.Panel:
    """Return a number that is 0, unless there is no exporter that could have reported something."""
    query = Query(f"{of} or 0 * count({EXPORTERS_KNOWN})")
    return stat_panel(title, query, Unit.COUNT, levels=levels, empty=NO_EXPORTERS)


NUMBERS: list[Panel] = [
    _count("Exporters down", f"count({DOWN})", ANY_HAS_FAILED).description(
        "How many exporters can Prometheus not scrape? Their nodes are not monitored."
    ),
    _count("NVML down", f"count({NVML_DOWN})").description(
        "On how many nodes is the driver not available? All nvml_ metrics of these nodes are "
        "missing; the metrics of their ranks are not affected."
    ),
    _count("Collectors failed", f"count({COLLECTORS_FAILED})").description(
        "How many collectors failed in the newest scrape? Their metrics are missing; the "
        "exporter's log contains the errors. Collectors on nodes without NVML do not count."
    ),
    _count("Files rejected", f"sum({REJECTED})").description(
        "How many files in run directories did the exporters reject in the time range?"
    ),
    _count("SDK errors", f"sum({SDK_ERRORS})").description(
        "How many errors did the SDK catch in the selected time range? Training continues, "
        "but some values may be missing."
    ),
    stat_panel(
        "Highest SDK cost", f"max({SDK_CORES})", Unit.RATIO, levels=SDK_COST, empty="No rank"
    )
    .description(
        "What does the SDK cost in the rank where it costs most? CPU time as a share of one core."
    )
    .decimals(2),
]


def _problem(expression: str, what: str, detail: str) -> str:
    """Return a problem as rows of the table: what it is, and the label `detail`."""
    named = f'label_replace({expression}, "what", "{what}", "", "")'
    if detail:
        named = f'label_replace({named}, "detail", "$1", "{detail}", "(.*)")'
    return row(PROBLEM_ROW, named)


def _problems() -> Panel:
    directory = f"{select(catalog.RUN_DIRECTORY_PROBLEM)} == 1"
    problems = {
        "No exporter": (f"absent({EXPORTERS_KNOWN})", "", FAILED),
        "Exporter is down": (f"1 + ({DOWN})", "", FAILED),
        "NVML is down": (f"1 + ({NVML_DOWN})", "reason", ATTENTION),
        "Collector fails": (f"1 + ({COLLECTORS_FAILED})", "collector", ATTENTION),
        "Run directory": (directory, "problem", ATTENTION),
        "Files rejected": (f"{REJECTED} > 0", "reason", ATTENTION),
        "SDK error": (f"{SDK_STAGE_ERRORS} > 0", "stage", ATTENTION),
        "Pressure hook dropped": (f"{HOOKS_DROPPED} > 0", "fault", ATTENTION),
    }
    rows = " or ".join(
        _problem(expression, what, detail) for what, (expression, detail, _) in problems.items()
    )
    none = f'label_replace(vector(0), "what", "{NOTHING_IS_WRONG}", "", "")'
    query = row(PROBLEM_ROW, f"{rows} or {none} unless on () count({rows}) > 0")
    colors = {what: color for what, (_, _, color) in problems.items()}
    columns = [
        Column("What", query, label="what", colors={NOTHING_IS_WRONG: GOOD, **colors}),
        Column("Detail", label="detail"),
        Column("Node", label="instance", link=LINK_TO_NODE),
        Column("Run", label="run"),
        Column("Rank", label="rank"),
        Column("Count", query, width=90),
    ]
    table = joined_table("Problems", columns, sort="What")
    table.description(
        "What is wrong with the monitoring, and where? Counts are for the time range. The "
        "exporter's log has the details of its own problems, and the log of the training job has "
        "the details of SDK errors."
    ).no_value(NOTHING_IS_WRONG)
    return table.height(7).min_width(80)


def _lines(title: str, query: Query, unit: str, mark: Levels | None = None) -> timeseries.Panel:
    """Return lines with room for ten of them in the legend."""
    return lines(title, query, unit, mark=mark).height(9).no_value(NO_EXPORTER)


def _worst_nodes(expression: str) -> Query:
    return Query(worst(row(NODE_ROW, expression), NODE_ROW), "{{instance}}")


def _worst_ranks(expression: str) -> Query:
    """Return the worst ranks of an expression over live processes."""
    return Query(worst(of_ranks(expression)), RUN_RANK)


_COLLECTOR_ROW = ("instance", "collector")
_COLLECTOR = "{{instance}}: {{collector}}"
_FAILED_ONCE = f"min_over_time({select(catalog.COLLECTOR_SUCCESS, over='$__range')} @ end()) == 0"
EXPORTERS: list[Panel] = [
    _lines(
        "Scrape duration", _worst_nodes(_scraped(recorded.SCRAPE_DURATION)), Unit.SECONDS
    ).description(
        "How long does Prometheus wait for each exporter? The shipped timeout is 8 s. A "
        "driver that responds slowly shows up here first."
    ),
    _lines("Scrape size", _worst_nodes(_scraped(recorded.SCRAPE_SAMPLES)), Unit.COUNT).description(
        "How many samples does each exporter expose? The number grows with GPUs, ranks and "
        "processes, and so does Prometheus' memory."
    ),
    _lines(
        "Collector duration",
        Query(
            worst(row(_COLLECTOR_ROW, select(catalog.COLLECTOR_DURATION)), _COLLECTOR_ROW),
            _COLLECTOR,
        ),
        Unit.SECONDS,
    ).description("Which collector takes most of a scrape?"),
    _lines(
        "Ranks per exporter",
        _worst_nodes(f"count by (instance) ({select(catalog.SAMPLE_TIMESTAMP)})"),
        Unit.COUNT,
    )
    .description(
        "How many processes does each exporter read? If the number is lower than the "
        "number of ranks of the running jobs, a run directory is not shared."
    )
    .no_value("No rank on any node"),
    state_timeline(
        "Collectors that failed",
        Query(
            f"{select(catalog.COLLECTOR_SUCCESS)} and on (instance, collector) {_FAILED_ONCE} "
            f"unless on (instance) ({NVML_DOWN})",
            _COLLECTOR,
        ),
        {0: ("failed", FAILED), 1: ("works", GOOD)},
    )
    .description(
        "Which collector of the exporter fails, and since when? The metrics of a failed "
        "collector are missing; all other metrics are complete. Collectors on nodes without "
        "NVML do not count."
    )
    .no_value("No collector failed")
    .span(12),
    stat_panel(
        "Nodes by version",
        Query(f"count by (version) ({select(catalog.BUILD_INFO)})", "{{version}}"),
        Unit.COUNT,
        empty=NO_EXPORTER,
    )
    .description("Which versions of torchmem are running, on how many nodes?")
    .span(12)
    .height(9),
]

_REJECTED_RATE = f"60 * sum by (instance, reason) ({rate(select(catalog.REJECTED_SAMPLES))}) > 0"
_FREE_BYTES, _SIZE = map(select, (catalog.RUN_DIRECTORY_FREE, catalog.RUN_DIRECTORY_SIZE))
_FREE_INODES, _INODES = map(
    select, (catalog.RUN_DIRECTORY_FREE_INODES, catalog.RUN_DIRECTORY_INODES)
)


def _fullest(expression: str) -> str:
    return worst(row(NODE_ROW, expression), NODE_ROW, lowest=True)


RUN_DIRECTORIES: list[Panel] = [
    _lines("Room for files", Query(_fullest(_FREE_BYTES), "{{instance}}"), Unit.BYTES).description(
        "How much can users still write to the run directory? When it is full, ranks cannot "
        "publish and an OutOfMemoryError leaves no report."
    ),
    _lines(
        "Room in the run directory",
        Query(
            _fullest(
                f"{_FREE_BYTES} / {_SIZE} < {_FREE_INODES} / {_INODES} or "
                f"{_FREE_INODES} / {_INODES} or {_FREE_BYTES} / {_SIZE}"
            ),
            "{{instance}}",
        ),
        Unit.RATIO,
    ).description(
        "Can ranks still write their files? The free share of the file system of the run "
        "directory, in bytes or in files, whichever is less. Without room, the values of all "
        "ranks of the node get stale."
    ),
    _lines(
        "Files rejected per minute",
        Query(_REJECTED_RATE, "{{instance}}: {{reason}}"),
        Unit.PER_MINUTE,
    )
    .description(
        "Why are files in the run directory rejected? Each version of a file is counted once; "
        "the exporter's log names the first file of each user and reason."
    )
    .no_value("None")
    .span(24),
]

_AGE, _SNAPSHOT_AGE = (
    f"time() - {select(spec)}" for spec in (catalog.SAMPLE_TIMESTAMP, catalog.SNAPSHOT_TIMESTAMP)
)
SDK: list[Panel] = [
    _lines(
        "CPU time of the SDK",
        _worst_ranks(rate(select(catalog.SDK_CPU))),
        Unit.RATIO,
        mark=SDK_COST,
    )
    .description("What does monitoring cost in each rank, as a share of one core?")
    .no_value(NO_RANK),
    _lines(
        "Duration of a statistics read",
        _worst_ranks(select(catalog.SAMPLE_DURATION, kind="stats")),
        Unit.SECONDS,
    )
    .description(
        "How long does reading the statistics take in the training process? The SDK reads them at "
        "the end of a step, at most once a second, and less often if a read takes long."
    )
    .no_value(NO_RANK),
    _lines(
        "Duration of a snapshot",
        _worst_ranks(select(catalog.SAMPLE_DURATION, kind="snapshot")),
        Unit.SECONDS,
    )
    .description(
        "How long does a snapshot of all blocks take in the background? It grows with the "
        "number of blocks, and the interval between snapshots grows with it."
    )
    .no_value("No snapshot yet"),
    _lines("Age of the sample", _worst_ranks(_AGE), Unit.SECONDS)
    .description(
        "How old are the values of each rank? More than a few seconds for a running rank "
        "means that it finishes no steps, its sampler hangs, or the run directory is full."
    )
    .no_value(NO_RANK),
    _lines("Age of the snapshot", _worst_ranks(_SNAPSHOT_AGE), Unit.SECONDS)
    .description(
        "How old are fragmentation and headroom? 10 s is usual. The age is higher if a "
        "snapshot takes long, or if the script records memory history itself."
    )
    .no_value("No snapshot yet"),
    _lines(
        "SDK errors by stage",
        Query(
            f"sum by (run, launch, rank, stage) ({select(catalog.SDK_STAGE_ERRORS)})",
            f"{RUN_RANK}: {{{{stage}}}}",
        ),
        Unit.COUNT,
    )
    .description(
        "In which stage did the SDK fail? Errors are counted since the start of each "
        "process; training is not affected."
    )
    .no_value("None"),
]

BOARD = Board(
    ITSELF,
    "torchmem itself",
    "Whether the exporters and the SDK work, and what they cost. Needs an exporter on "
    "each node and the recording rules.",
    ALL_VARIABLES,
    (
        Row("Does the monitoring work?", [*NUMBERS, _problems()]),
        Row("Exporters", EXPORTERS, collapsed=True),
        Row("Run directories", RUN_DIRECTORIES, collapsed=True),
        Row("SDK", SDK, collapsed=True),
    ),
)
