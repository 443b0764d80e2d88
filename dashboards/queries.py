"""PromQL that several dashboards share: selectors, filters, and rows of tables.

A selector is filtered by the variables of a dashboard, which dashboards/board.py declares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from dashboards import recorded

from torchmem.manifests import counters
from torchmem.metrics import catalog
from torchmem.metrics.catalog import CATALOG, GPU, RANK, MetricSpec

# Dashboard variables by the label that they filter. `cluster` may be on every series of a store,
# `job` and `instance` are on every scraped one.
FILTERS = {
    "cluster": "$cluster",
    "job": "$job",
    "instance": "$instance",
    "uuid": "$gpu",
    "namespace": "$namespace",
    "team": "$team",
    "user": "$user",
    "run": "$run",
    "launch": "$launches",
    "rank": "$rank",
}
OWNED = 'launch=~"${owned:pipe}"'
"""The launches of the selected namespaces, teams and users: few series have those labels."""
SCRAPED = ("job", "instance")
# An alert without an instance is shown whichever is selected.
ALERTS = (recorded.ALERTS, recorded.ALERTS_SINCE)

# Matchers of the alerts of torchmem, without the one that always fires.
TORCHMEM_ALERTS = 'alertname=~"Torchmem.*",severity!="none"'

# Labels that identify a process, and one row of a table.
PROCESS = ("job", "instance", *RANK)
DEVICE_ROW = ("instance", *GPU, *RANK)
GPU_ROW = ("instance", *GPU)
RANK_ROW = ("run", "launch", "rank", "instance")
RUN_ROW = ("run", "launch")
RUN_RANK = ("run", "launch", "rank")

# Lines of single ranks in a panel; more cannot be told apart.
MAX_LINES = 10


def select(spec: MetricSpec, suffix: str = "", over: str = "", **fixed: str) -> str:
    """Return a selector of one metric, filtered by the variables and by `fixed` label values.

    `over` is a range, such as 5m or $__range. Raises ValueError for a label that the metric lacks.
    """
    labels = {"cluster", *spec.labels, *(SCRAPED if spec.name in CATALOG else ())}
    unknown = set(fixed) - labels
    if unknown:
        raise ValueError(f"{spec.name} has no label {', '.join(sorted(unknown))}")
    matchers = filters(labels)
    if spec in ALERTS:
        matchers = [each.replace('$instance"', '$instance|"') for each in matchers]
    matchers += [f'{label}="{value}"' for label, value in fixed.items()]
    return f"{spec.name}{suffix}{{{', '.join(matchers)}}}" + (f"[{over}]" if over else "")


def filters(labels: Collection[str]) -> list[str]:
    """Return the matchers by which the variables filter series with these labels.

    `owned` filters by owner alone, whatever launches are selected.
    """
    matchers = [f'{label}=~"{value}"' for label, value in FILTERS.items() if label in labels]
    return matchers + ([OWNED] if {"launch", "owned"} & {*labels} else [])


def prepend_matcher(selector: str, matcher: str) -> str:
    """Return the selector with one more matcher in front."""
    return selector.replace("{", f"{{{matcher}, ", 1)


def append_matcher(selector: str, matcher: str) -> str:
    """Return the selector with one more matcher at the end."""
    return selector.replace('"}', f'", {matcher}}}')


def seen(spec: MetricSpec, **fixed: str) -> str:
    """Return the newest value within the time range, also of series that have ended."""
    return f"last_over_time({select(spec, over='$__range', **fixed)})"


_LIVE = f"{recorded.LIVE.name}{{{', '.join(filters(SCRAPED))}}}"


def live(expression: str) -> str:
    """Keep only ranks that hold memory now.

    The exporter serves the last values of a dead rank for 15 minutes.
    """
    return f"{expression} and on ({', '.join(PROCESS)}) {_LIVE}"


def of_ranks(expression: str, how: str = "max") -> str:
    """Return one value per rank of a run, over its devices.

    A rank is the same after a restart: the newest process continues its line, and a death ends it.
    """
    return f"{how} by (run, launch, rank) ({live(expression)})"


def newest(expression: str) -> str:
    """Keep only the newest process of each rank; it may have ended."""
    written = select(catalog.SAMPLE_TIMESTAMP)
    rank = ", ".join(RUN_RANK)
    last = f"{written} == on ({rank}) group_left () max by ({rank}) ({written})"
    return f"{expression} and on ({', '.join(PROCESS)}) ({last})"


def ranks_in(state: str) -> str:
    """Return how many ranks are in a state; a rank counts once, however often it has restarted."""
    return f"count({select(recorded.NEWEST_STATE, state=state)})"


def states(devices: str, state: str) -> str:
    """Return the state of processes as a label on each of their devices, as table rows.

    `devices` is an expression that is 0 for each of them; `state` selects states.
    """
    joined = f"{devices} + on ({', '.join(PROCESS)}) group_left (state) ({state} == 1)"
    return row(DEVICE_ROW, joined, "state")


def worst(
    expression: str,
    labels: Sequence[str] = RUN_RANK,
    *,
    lowest: bool = False,
    only: str = "",
) -> str:
    """Keep the MAX_LINES ranks, or other `labels`, with the highest or `lowest` values.

    They are chosen once for all points, so that no line begins or ends because of others. `only`
    the ranks of that expression are chosen from.
    """
    pick, over = ("bottomk", "min_over_time") if lowest else ("topk", "max_over_time")
    values = f"{over}(({expression})[$__range:$__rate_interval] @ end())"
    values = among(labels, values, only) if only else values
    return among(labels, expression, f"{pick}({MAX_LINES}, {values})")


def band(expression: str) -> dict[str, str]:
    """Return what all ranks have, by name; it exists if not every rank has a line."""
    of_all = {"highest": "max(", "lowest": "min(", "median": "quantile(0.5, "}
    return {
        name: f"{start}{expression}) and count({expression}) > {MAX_LINES}"
        for name, start in of_all.items()
    }


def began(selector: str, *, equals: int | None = None, by: Iterable[str] = ("run",)) -> str:
    """Return the series that exist, or have a value, now, and not 1, 5 or 10 minutes ago.

    One minute is the resolution of Grafana's annotations.
    """
    value = "" if equals is None else f" == {equals}"
    before = " or ".join(f"{selector} offset {minutes}m{value}" for minutes in (1, 5, 10))
    return f"count by ({', '.join(by)}) ({selector}{value} unless ({before}))"


def with_texts(expression: str, label: str, of: str, texts: Mapping[str, str]) -> str:
    """Add a label with the text for the value of the label `of`.

    A text in a label can be wrapped in a table's cell; the text of a value mapping cannot.
    """
    for value, text in texts.items():
        expression = f'label_replace({expression}, "{label}", "{text}", "{of}", "{value}")'
    return expression


def row(labels: Iterable[str], expression: str, *more: str) -> str:
    """Return one value per table row, that is per set of `labels`; `more` labels become columns."""
    return f"max by ({', '.join((*labels, *more))}) ({expression})"


def among(labels: Iterable[str], expression: str, rows: str) -> str:
    """Keep only the table rows that the expression `rows` has too."""
    return f"{expression} and on ({', '.join(labels)}) {rows}"


def rate(selector: str) -> str:
    """Return the per-second rate over Grafana's interval for the panel's resolution."""
    return f"rate({selector}[$__rate_interval])"


def sum_without_pool(spec: MetricSpec) -> str:
    """Return allocator bytes per process and device, over the small and the large pool."""
    return f"sum without (pool) ({select(spec)})"


def ooms_in_range(**fixed: str) -> str:
    """Return the OOMs of each process within the time range, by cause, also if it has ended."""
    return counters.ooms(
        select(recorded.POSITIVE_OOMS, **fixed),
        select(recorded.KNOWN_RANKS),
        select(catalog.LAST_OOM_TIMESTAMP),
        window="$__range",
    )


# Queries that more than one dashboard shows: one definition for each question.
OOMS_IN_RANGE = f"sum({ooms_in_range()})"
RETRIES_PER_MINUTE = f"60 * {rate(select(catalog.ALLOC_RETRIES))}"
HEADROOM = select(recorded.MIN_HEADROOM)
HEADROOM_FALL = select(recorded.HEADROOM_FALL)
HEADROOM_SHARE = f"{HEADROOM} / {select(catalog.DEVICE_TOTAL)}"
STRANDED_SHARE = live(select(recorded.STRANDED_RATIO))
EXHAUSTION = select(recorded.EXHAUSTION)
RETRIES_IN_10_MINUTES = f"sum({select(recorded.RETRIES_10M)})"
# Grafana's time axis counts in milliseconds since 1970. One mark for ranks that fail together.
LAST_OOM_MILLISECONDS = f"1000 * {select(catalog.LAST_OOM_TIMESTAMP)}"
NEWEST_OOM_OF_RUN = f"topk by (run, launch) (1, {LAST_OOM_MILLISECONDS})"


# --- GPUs

_NAMES = select(recorded.SHORT_NAME)
_SEVERAL_NODES = f"count(count by (instance) ({_NAMES})) > 1"
GPU_NAMES = (
    f'label_join({_NAMES}, "short_name", " ", "instance", "short_name") and on () {_SEVERAL_NODES} '
    f"or {_NAMES} unless on () {_SEVERAL_NODES}"
)
"""1 for every GPU, with the label short_name: "#3 H100", after the node if several are selected."""


_NODES = f"group by (instance) ({select(recorded.NODE_GPUS)})"


def some_gpus(expression: str) -> str:
    """Return the few GPUs of an expression, and one node without a GPU label, for `among`.

    VictoriaMetrics evaluates them first, and then reads only the series of their nodes. If they
    were none, it would read all series.
    """
    return f"({expression} or topk(1, {_NODES}))"


def names_among(gpus: str) -> str:
    """Return what GPU_NAMES does, for some GPUs: in a large fleet, it costs a third."""
    names = among(("instance", "uuid"), _NAMES, gpus)
    # "NODE ": the label that it is joined with does not exist yet.
    several = f'label_join({_NODES}, "node", " ", "instance", "node") and on () count({_NODES}) > 1'
    joined = f"({names}) * on (instance) group_left (node) ({several} or on (instance) {_NODES})"
    return f'label_join({joined}, "short_name", "", "node", "short_name")'


SICK = append_matcher(select(recorded.HEALTH), 'health!="healthy"')
SICK_GPUS = f"count({SICK}) or 0 * sum({select(recorded.NODE_GPUS)})"
"""GPUs that are lost, or need a reset or a replacement."""

WASTED_GPU_HOURS = f"sum(sum_over_time({select(recorded.NODE_WASTED)}[$__range:1m])) / 60"
GPU_HOURS = f"sum_over_time({select(recorded.WASTED)}[$__range:1m]) / 60"
"""GPU-hours that each GPU wasted within the time range: a value per minute, added up."""


def named(expression: str) -> str:
    """Add the label short_name to the values of GPUs, for legends."""
    return f"({expression}) * on (instance, uuid) group_left (short_name) ({GPU_NAMES})"
