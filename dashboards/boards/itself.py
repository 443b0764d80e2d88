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
    Text,
    Unit,
    joined_table,
    lines,
    stat_panel,
    state_timeline,
)
from dashboards.queries import live, of_ranks, prepend_matcher, rate, row, select, worst
from grafana_foundation_sdk.builders import timeseries

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
NONE = f"0 * count({EXPORTERS_KNOWN})"
"""0, unless there is no exporter that could have reported something."""
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

NUMBERS: list[Panel] = [
    stat_panel(
        Text(
            "Exporters down",
            "How many exporters can Prometheus not scrape? Their nodes are not monitored.",
            NO_EXPORTERS,
        ),
        Query(f"count({DOWN}) or {NONE}"),
        Unit.COUNT,
        levels=ANY_HAS_FAILED,
    ),
    stat_panel(
        Text(
            "NVML down",
            "On how many nodes is the driver not available? All nvml_ metrics of these nodes are "
            "missing; the metrics of their ranks are not affected.",
            NO_EXPORTERS,
        ),
        Query(f"count({NVML_DOWN}) or {NONE}"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "Collectors failed",
            "How many collectors failed in the newest scrape? Their metrics are missing; the "
            "exporter's log contains the errors. Collectors on nodes without NVML do not count.",
            NO_EXPORTERS,
        ),
        Query(f"count({COLLECTORS_FAILED}) or {NONE}"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "Files rejected",
            "How many files in run directories did the exporters reject in the time range?",
            NO_EXPORTERS,
        ),
        Query(f"sum({REJECTED}) or {NONE}"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "SDK errors",
            "How many errors did the SDK catch in the selected time range? Training continues, "
            "but some values may be missing.",
            NO_EXPORTERS,
        ),
        Query(f"sum({SDK_ERRORS}) or {NONE}"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "Highest SDK cost",
            "What does the SDK cost in the rank where it costs most? CPU time as a share of "
            "one core.",
            "No rank",
        ),
        Query(f"max({SDK_CORES})"),
        Unit.RATIO,
        levels=SDK_COST,
    ).decimals(2),
]


def _problem(expression: str, what: str, detail: str) -> str:
    """Return a problem as rows of the table: what it is, and the label `detail`."""
    named = f'label_replace({expression}, "what", "{what}", "", "")'
    if detail:
        named = f'label_replace({named}, "detail", "$1", "{detail}", "(.*)")'
    return row(PROBLEM_ROW, named)


def _problems() -> Panel:
    text = Text(
        "Problems",
        "What is wrong with the monitoring, and where? Counts are for the time range. The "
        "exporter's log has the details of its own problems, and the log of the training job has "
        "the details of SDK errors.",
        NOTHING_IS_WRONG,
    )
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
    return joined_table(text, columns, sort="What").height(7).min_width(80)


def _lines(
    text: Text, queries: list[Query], unit: str, mark: Levels | None = None
) -> timeseries.Panel:
    """Return lines with room for ten of them in the legend."""
    return lines(text, queries, unit, mark=mark).height(9)


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
        Text(
            "Scrape duration",
            "How long does Prometheus wait for each exporter? The shipped timeout is 8 s. A "
            "driver that responds slowly shows up here first.",
            NO_EXPORTER,
        ),
        [_worst_nodes(_scraped(recorded.SCRAPE_DURATION))],
        Unit.SECONDS,
    ),
    _lines(
        Text(
            "Scrape size",
            "How many samples does each exporter expose? The number grows with GPUs, ranks and "
            "processes, and so does Prometheus' memory.",
            NO_EXPORTER,
        ),
        [_worst_nodes(_scraped(recorded.SCRAPE_SAMPLES))],
        Unit.COUNT,
    ),
    _lines(
        Text("Collector duration", "Which collector takes most of a scrape?", NO_EXPORTER),
        [
            Query(
                worst(row(_COLLECTOR_ROW, select(catalog.COLLECTOR_DURATION)), _COLLECTOR_ROW),
                _COLLECTOR,
            )
        ],
        Unit.SECONDS,
    ),
    _lines(
        Text(
            "Ranks per exporter",
            "How many processes does each exporter read? If the number is lower than the "
            "number of ranks of the running jobs, a run directory is not shared.",
            "No rank on any node",
        ),
        [_worst_nodes(f"count by (instance) ({select(catalog.SAMPLE_TIMESTAMP)})")],
        Unit.COUNT,
    ),
    state_timeline(
        Text(
            "Collectors that failed",
            "Which collector of the exporter fails, and since when? The metrics of a failed "
            "collector are missing; all other metrics are complete. Collectors on nodes without "
            "NVML do not count.",
            "No collector failed",
        ),
        Query(
            f"{select(catalog.COLLECTOR_SUCCESS)} and on (instance, collector) {_FAILED_ONCE} "
            f"unless on (instance) ({NVML_DOWN})",
            _COLLECTOR,
        ),
        {0: ("failed", FAILED), 1: ("works", GOOD)},
    ).span(12),
    stat_panel(
        Text(
            "Nodes by version",
            "Which versions of torchmem are running, on how many nodes?",
            NO_EXPORTER,
        ),
        Query(f"count by (version) ({select(catalog.BUILD_INFO)})", "{{version}}"),
        Unit.COUNT,
    )
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
    _lines(
        Text(
            "Room for files",
            "How much can users still write to the run directory? When it is full, ranks cannot "
            "publish and an OutOfMemoryError leaves no report.",
            NO_EXPORTER,
        ),
        [Query(_fullest(_FREE_BYTES), "{{instance}}")],
        Unit.BYTES,
    ),
    _lines(
        Text(
            "Room in the run directory",
            "Can ranks still write their files? The free share of the file system of the run "
            "directory, in bytes or in files, whichever is less. Without room, the values of all "
            "ranks of the node get stale.",
            NO_EXPORTER,
        ),
        [
            Query(
                _fullest(
                    f"{_FREE_BYTES} / {_SIZE} < {_FREE_INODES} / {_INODES} or "
                    f"{_FREE_INODES} / {_INODES} or {_FREE_BYTES} / {_SIZE}"
                ),
                "{{instance}}",
            )
        ],
        Unit.RATIO,
    ),
    _lines(
        Text(
            "Files rejected per minute",
            "Why are files in the run directory rejected? Each version of a file is counted once; "
            "the exporter's log names the first file of each user and reason.",
            "None",
        ),
        [Query(_REJECTED_RATE, "{{instance}}: {{reason}}")],
        Unit.PER_MINUTE,
    ).span(24),
]

_AGE, _SNAPSHOT_AGE = (
    f"time() - {select(spec)}" for spec in (catalog.SAMPLE_TIMESTAMP, catalog.SNAPSHOT_TIMESTAMP)
)
SDK: list[Panel] = [
    _lines(
        Text(
            "CPU time of the SDK",
            "What does monitoring cost in each rank, as a share of one core?",
            NO_RANK,
        ),
        [_worst_ranks(rate(select(catalog.SDK_CPU)))],
        Unit.RATIO,
        mark=SDK_COST,
    ),
    _lines(
        Text(
            "Duration of a statistics read",
            "How long does reading the statistics take in the training process? The SDK reads "
            "them at the end of a step, at most once a second, and less often if a read takes "
            "long.",
            NO_RANK,
        ),
        [_worst_ranks(select(catalog.SAMPLE_DURATION, kind="stats"))],
        Unit.SECONDS,
    ),
    _lines(
        Text(
            "Duration of a snapshot",
            "How long does a snapshot of all blocks take in the background? It grows with the "
            "number of blocks, and the interval between snapshots grows with it.",
            "No snapshot yet",
        ),
        [_worst_ranks(select(catalog.SAMPLE_DURATION, kind="snapshot"))],
        Unit.SECONDS,
    ),
    _lines(
        Text(
            "Age of the sample",
            "How old are the values of each rank? More than a few seconds for a running rank "
            "means that it finishes no steps, its sampler hangs, or the run directory is full.",
            NO_RANK,
        ),
        [_worst_ranks(_AGE)],
        Unit.SECONDS,
    ),
    _lines(
        Text(
            "Age of the snapshot",
            "How old are fragmentation and headroom? 10 s is usual. The age is higher if a "
            "snapshot takes long, or if the script records memory history itself.",
            "No snapshot yet",
        ),
        [_worst_ranks(_SNAPSHOT_AGE)],
        Unit.SECONDS,
    ),
    _lines(
        Text(
            "SDK errors by stage",
            "In which stage did the SDK fail? Errors are counted since the start of each "
            "process; training is not affected.",
            "None",
        ),
        [
            Query(
                f"sum by (run, launch, rank, stage) ({select(catalog.SDK_STAGE_ERRORS)})",
                f"{RUN_RANK}: {{{{stage}}}}",
            )
        ],
        Unit.COUNT,
    ),
]

BOARD = Board(
    ITSELF,
    "torchmem itself",
    "Whether the exporters and the SDK work, and what they cost.",
    ALL_VARIABLES,
    (
        Row("Does the monitoring work?", [*NUMBERS, _problems()]),
        Row("Exporters", EXPORTERS, collapsed=True),
        Row("Run directories", RUN_DIRECTORIES, collapsed=True),
        Row("SDK", SDK, collapsed=True),
    ),
)
