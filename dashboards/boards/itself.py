"""The dashboard "torchmem itself": whether the monitoring works, and what it costs."""

from __future__ import annotations

from dashboards import recorded
from dashboards.board import ALL_VARIABLES, ITSELF, Board, Row
from dashboards.colors import ANY_IS_WRONG
from dashboards.panels import (
    RANK,
    Panel,
    Query,
    Text,
    Unit,
    lines,
    stat_panel,
    state_timeline,
)
from dashboards.queries import (
    live,
    prepend_matcher,
    rate,
    select,
)

from torchmem.sample import catalog
from torchmem.sample.catalog import MetricSpec
from torchmem.sample.colors import FAILED, GOOD

NO_EXPORTER = "Prometheus scrapes no exporter with job torchmem"
NO_RANK = "No rank matches the selection"

SDK_CORES = live(rate(select(catalog.SDK_CPU)))


def _scraped(spec: MetricSpec) -> str:
    return prepend_matcher(select(spec), 'job="torchmem"')


def _increase_in_range(spec: MetricSpec) -> str:
    return f"sum(round(increase({select(spec, over='$__range')}))) or vector(0)"


NUMBERS: list[Panel] = [
    stat_panel(
        Text(
            "Exporters down",
            "How many exporters can Prometheus not scrape? Their nodes are not monitored.",
        ),
        Query(f"count({_scraped(recorded.UP)} == 0) or vector(0)"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "Versions",
            "Which versions of torchmem are running, on how many nodes?",
            NO_EXPORTER,
        ),
        Query(f"count by (version) ({select(catalog.BUILD_INFO)})", "{{version}}"),
        Unit.COUNT,
    ),
    stat_panel(
        Text(
            "Collectors failed",
            "How many collectors failed in the newest scrape? They are shown by node below; "
            "the exporter's log contains the errors.",
            NO_EXPORTER,
        ),
        Query(f"count({select(catalog.COLLECTOR_SUCCESS)} == 0) or vector(0)"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "Files rejected",
            "How many files in run directories did the exporters reject in the selected time "
            "range? They are shown by reason below.",
            NO_EXPORTER,
        ),
        Query(_increase_in_range(catalog.REJECTED_SAMPLES)),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "SDK errors",
            "How many errors did the SDK catch in the selected time range? Training continues, "
            "but some values may be missing. They are shown by stage below.",
            NO_RANK,
        ),
        Query(_increase_in_range(catalog.SDK_ERRORS)),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    ),
    stat_panel(
        Text(
            "Highest SDK cost",
            "What does the SDK cost in the rank where it costs most? CPU time as a share of "
            "one core.",
            NO_RANK,
        ),
        Query(f"topk(1, {SDK_CORES})", RANK),
        Unit.RATIO,
    ).decimals(3),
]

SCRAPES: list[Panel] = [
    lines(
        Text(
            "Scrape duration",
            "How long does Prometheus wait for each exporter? The shipped timeout is 8 s. A "
            "driver that responds slowly shows up here first.",
            NO_EXPORTER,
        ),
        [Query(_scraped(recorded.SCRAPE_DURATION), "{{instance}}")],
        Unit.SECONDS,
    ),
    lines(
        Text(
            "Scrape size",
            "How many samples does each exporter expose? The number grows with GPUs, ranks and "
            "processes, and so does Prometheus' memory.",
            NO_EXPORTER,
        ),
        [Query(_scraped(recorded.SCRAPE_SAMPLES), "{{instance}}")],
        Unit.COUNT,
    ),
]

_SERIES = "{{instance}}: {{collector}}"
COLLECTORS: list[Panel] = [
    state_timeline(
        Text(
            "Collectors",
            "Which collector of the exporter fails, and since when? The metrics of a failed "
            "collector are missing; all other metrics are complete.",
            NO_EXPORTER,
        ),
        Query(select(catalog.COLLECTOR_SUCCESS), _SERIES),
        {0: ("failed", FAILED), 1: ("works", GOOD)},
    ),
    lines(
        Text("Collector duration", "Which collector takes most of a scrape?", NO_EXPORTER),
        [Query(select(catalog.COLLECTOR_DURATION), _SERIES)],
        Unit.SECONDS,
    ),
]

_REJECTED = f"60 * sum by (instance, reason) ({rate(select(catalog.REJECTED_SAMPLES))}) > 0"
_FREE_BYTES, _SIZE = map(select, (catalog.RUN_DIRECTORY_FREE, catalog.RUN_DIRECTORY_SIZE))
_FREE_INODES, _INODES = map(
    select, (catalog.RUN_DIRECTORY_FREE_INODES, catalog.RUN_DIRECTORY_INODES)
)
INPUTS: list[Panel] = [
    lines(
        Text(
            "Files rejected per minute",
            "Why are files in the run directory rejected? Each version of a file is counted once; "
            "the exporter's log names the first file of each user and reason.",
            "None",
        ),
        [Query(_REJECTED, "{{instance}}: {{reason}}")],
        Unit.PER_MINUTE,
    ),
    lines(
        Text(
            "Room for files",
            "How much can users still write to the run directory? When it is full, ranks cannot "
            "publish and an OutOfMemoryError leaves no report.",
            NO_EXPORTER,
        ),
        [Query(select(catalog.RUN_DIRECTORY_FREE), "{{instance}}")],
        Unit.BYTES,
    ),
    stat_panel(
        Text(
            "Nodes without NVML",
            "On how many nodes is the driver not available, and why? All nvml_ metrics of "
            "these nodes are missing; the metrics of their ranks are not affected.",
            "None",
        ),
        Query(f"count by (reason) ({select(catalog.NVML_UP)} == 0)", "{{reason}}"),
        Unit.COUNT,
        levels=ANY_IS_WRONG,
    )
    .span(12)
    .height(8),
    lines(
        Text(
            "Room in the run directory",
            "Can ranks still write their files? The free share of the file system of the run "
            "directory, in bytes and in files. Without room, the values of all ranks of the "
            "node get stale.",
            NO_EXPORTER,
        ),
        [
            Query(f"{_FREE_BYTES} / {_SIZE}", "{{instance}}, bytes"),
            Query(f"{_FREE_INODES} / {_INODES}", "{{instance}}, files"),
        ],
        Unit.RATIO,
    ),
    lines(
        Text(
            "Ranks per exporter",
            "How many processes does each exporter read? If the number is lower than the "
            "number of ranks of the running jobs, a run directory is not shared.",
            "No rank on any node",
        ),
        [Query(f"count by (instance) ({select(catalog.SAMPLE_TIMESTAMP)})", "{{instance}}")],
        Unit.COUNT,
    ),
]

SDK_COST: list[Panel] = [
    lines(
        Text(
            "CPU time of the SDK",
            "What does monitoring cost in each rank, as a share of one core?",
            NO_RANK,
        ),
        [Query(SDK_CORES, RANK)],
        Unit.RATIO,
    ),
    lines(
        Text(
            "Duration of a statistics read",
            "How long does reading the statistics take in the training process? The SDK reads "
            "them at the end of a step, at most once a second, and less often if a read takes "
            "long.",
            NO_RANK,
        ),
        [Query(live(select(catalog.SAMPLE_DURATION, kind="stats")), RANK)],
        Unit.SECONDS,
    ),
    lines(
        Text(
            "Duration of a snapshot",
            "How long does a snapshot of all blocks take in the background? It grows with the "
            "number of blocks, and the interval between snapshots grows with it.",
            "No snapshot yet",
        ),
        [Query(live(select(catalog.SAMPLE_DURATION, kind="snapshot")), RANK)],
        Unit.SECONDS,
    ),
]

_ERRORS = f"sum by (run, rank, stage) ({select(catalog.SDK_ERRORS)}) > 0"
SDK_HEALTH: list[Panel] = [
    lines(
        Text(
            "Age of the sample",
            "How old are the values of each rank? More than a few seconds for a running rank "
            "means that it finishes no steps, its sampler hangs, or the run directory is full.",
            NO_RANK,
        ),
        [Query(live(f"time() - {select(catalog.SAMPLE_TIMESTAMP)}"), RANK)],
        Unit.SECONDS,
    ),
    lines(
        Text(
            "Age of the snapshot",
            "How old are fragmentation and headroom? 10 s is usual. The age is higher if a "
            "snapshot takes long, or if the script records memory history itself.",
            "No snapshot yet",
        ),
        [Query(live(f"time() - {select(catalog.SNAPSHOT_TIMESTAMP)}"), RANK)],
        Unit.SECONDS,
    ),
    lines(
        Text(
            "SDK errors by stage",
            "In which stage did the SDK fail? Errors are counted since the start of each "
            "process; training is not affected.",
            "None",
        ),
        [Query(_ERRORS, f"{RANK}: {{{{stage}}}}")],
        Unit.COUNT,
    ),
]

BOARD = Board(
    ITSELF,
    "torchmem itself",
    "Whether the exporters and the SDK work, and what they cost.",
    ALL_VARIABLES,
    (
        Row("Overview", NUMBERS),
        Row("Exporters", [*SCRAPES, *COLLECTORS, *INPUTS]),
        Row("SDK", [*SDK_COST, *SDK_HEALTH]),
    ),
)
