"""Whole dashboards: variables, rows, links to each other, and marks on the time axis."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from dashboards import recorded
from dashboards.panels import DATASOURCE, Column, Json, Panel
from dashboards.queries import (
    HEADROOM_SHARE,
    NEWEST_OOM_OF_RUN,
    TORCHMEM_ALERTS,
    append_matcher,
    began,
    filters,
    prepend_matcher,
    select,
)
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

from torchmem.allocator.settings import ADVICE_LABEL
from torchmem.explain import thresholds
from torchmem.metrics import catalog, colors
from torchmem.metrics.catalog import MetricSpec

FLEET, TRAINING, NODE, OOM, ITSELF = (
    "torchmem-fleet",
    "torchmem-training-memory",
    "torchmem-node",
    "torchmem-oom",
    "torchmem-self",
)
TAG = "torchmem"
ALL = models.VariableOption(selected=True, text=["All"], value=["$__all"])


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the dashboard: its label on screen and Grafana's query for its values.

    A `hidden` variable is computed, keeps the selection for the next dashboard, or is one that most
    fleets lack. `single` is the initial value of a variable that holds one value only. Without
    `all`, the first value is selected at first; `every` is what stands for all of them, "" for
    their list. Without `sort`, the values keep the order of the query.
    """

    name: str
    label: str
    query: str
    regex: str = ""
    hidden: bool = False
    single: str | None = None
    all: bool = True
    every: str = ".*"
    sort: bool = True


def _label_values(spec: MetricSpec, label: str, *filtered_by: str) -> str:
    """Return Grafana's query for the values of a label, filtered by the variables to its left."""
    return f"label_values({spec.name}{_matchers(*filtered_by)}, {label})"


def _matchers(*filtered_by: str) -> str:
    matchers = ", ".join(filters(filtered_by))
    return f"{{{matchers}}}" if matchers else ""


def _gpus(spec: MetricSpec, *filtered_by: str) -> str:
    """Return Grafana's query for GPUs: the value is the UUID, the text is node and index."""
    values = f"last_over_time({spec.name}{_matchers(*filtered_by)}[$__range])"
    devices = f"max by (instance, gpu, uuid) ({values})"
    return f'query_result(label_join({devices}, "where", " GPU ", "instance", "gpu"))'


def _runs_or_none() -> str:
    """Return Grafana's query for all runs and the value none."""
    none = 'label_replace(vector(0), "run", "none", "", "")'
    runs = f"max by (run) (max_over_time({catalog.PROCESS_STATE.name}[$__range]))"
    return f"query_result({none} or {runs})"


def _launch_starts(runs: str) -> str:
    """Return when the newest rank of each launch started, also if all of them have ended."""
    started = f"{catalog.PROCESS_START.name}{_matchers('cluster', 'job')}[$__range]"
    of_runs = append_matcher(started, f'run=~"{runs}"')
    return f"max by (run, launch) (last_over_time({of_runs}))"


def _named_newest() -> str:
    """Return the value that stands for the newest launch; it is later than all of them."""
    return f'label_replace(vector(1e12), "launch", "{NEWEST}", "", "")'


_UUID_AND_TEXT = '/uuid="(?<value>[^"]+)".*where="(?<text>[^"]+)"/'

_TARGETS = ("cluster", "job")
_OF_OWNER = (*_TARGETS, "namespace", "team", "user")
# Without the label, nothing is filtered: `.*` also matches what is not there. Grafana cannot hide a
# variable that has no values, so these are hidden until `torchmem manifests dashboards --show`.
_CLUSTER = Variable("cluster", "Cluster", _label_values(catalog.BUILD_INFO, "cluster"), hidden=True)
_JOB = Variable("job", "Job", _label_values(catalog.BUILD_INFO, "job", "cluster"), every=".+")
_OWNERS = tuple(
    Variable(
        label,
        label.capitalize(),
        _label_values(recorded.RUN_GPUS, label, *_OF_OWNER[: _OF_OWNER.index(label)]),
        hidden=True,
    )
    for label in ("namespace", "team", "user")
)


def _owned() -> str:
    """Return Grafana's query for the launches of the selected owners, or `.*` if all are.

    The texts of the variables are compared as labels, because PromQL compares no other text.
    """
    chosen = 'label_replace(vector(1), "chosen", "{}", "", "")'
    is_all = (
        f"{chosen.format('$namespace $team $user')} and on (chosen) {chosen.format('.* .* .*')}"
    )
    every = f'label_replace({is_all}, "launch", ".*", "", "")'
    matchers = ", ".join(each for each in filters(_OF_OWNER))
    owned = f"last_over_time({recorded.RUN_GPUS.name}{{{matchers}}}[$__range])"
    return f"query_result({every} or on () group by (launch) ({owned}))"


_OWNED = Variable(
    "owned", "Launches of owners", _owned(), '/launch="([^"]*)"/', hidden=True, every=""
)
# From left to right; each variable filters those to its right.
_FIRST = (_CLUSTER, _JOB, *_OWNERS, _OWNED)
_RUN = Variable("run", "Run", _label_values(catalog.PROCESS_STATE, "run", *_TARGETS, "owned"))
_RANK = Variable(
    "rank",
    "Rank",
    _label_values(catalog.PROCESS_STATE, "rank", *_TARGETS, "run", "instance"),
)
_INSTANCE = Variable(
    "instance",
    "Instance",
    _label_values(catalog.PROCESS_STATE, "instance", *_TARGETS, "run"),
    every=".+",
)
_GPU = Variable(
    "gpu", "GPU", _gpus(catalog.RESERVED_PEAK, *_TARGETS, "instance", "run"), _UUID_AND_TEXT
)
# All launches, for dashboards of several runs.
_LAUNCHES = Variable(
    "launches",
    "Launch",
    _label_values(catalog.PROCESS_STATE, "launch", *_TARGETS, "run", "owned"),
)
# A dashboard of one run shows the newest launch, unless others are selected: `launches` is what it
# shows. A launch starts with its newest rank. The run that it is compared with has one, too.
NEWEST = "newest"
_LAUNCH = Variable(
    "launch",
    "Launch",
    f"query_result(sort_desc({_launch_starts('$run')} or {_named_newest()}))",
    '/launch="([^"]+)"/',
    all=False,
    sort=False,
)
_STARTS = _launch_starts("$run|$compare")
_SELECTED = append_matcher(_STARTS, 'launch=~"$launch"')
_OF_RUN_NEWEST = f"({_STARTS} == on (run) group_left () max by (run) ({_STARTS}))"
CHOSEN_LAUNCHES = Variable(
    "launches",
    "Launches shown",
    f"query_result({_SELECTED} or {_OF_RUN_NEWEST} unless on (run) {_SELECTED})",
    '/launch="([^"]+)"/',
    hidden=True,
    every="",
)
COMPARE = Variable("compare", "Compare with run", _runs_or_none(), '/run="([^"]+)"/', single="none")
# The ranks for which a panel is repeated.
_SHOWN = 8
_LEAST = f"bottomk({_SHOWN}, min by (rank) ({HEADROOM_SHARE}))"
_FULLEST = f"topk({_SHOWN}, max by (rank) ({select(catalog.RESERVED_PEAK)}))"
SHOWN_RANKS = Variable(
    "shown",
    "Ranks shown",
    f"query_result({_LEAST} or ({_FULLEST} unless on () {HEADROOM_SHARE}))",
    '/rank="([^"]+)"/',
    hidden=True,
)
# Nodes on which no training runs, and GPUs that no rank uses, can be selected too.
_ANY_INSTANCE = replace(_INSTANCE, query=_label_values(catalog.BUILD_INFO, "instance", *_TARGETS))
_ANY_GPU = replace(_GPU, query=_gpus(catalog.NVML_GPU_UP, *_TARGETS, "instance"))

ONE_RUN_VARIABLES = (*_FIRST, replace(_RUN, all=False), _LAUNCH, _INSTANCE, _GPU, _RANK)
TRAINING_VARIABLES = (*_FIRST, _RUN, _LAUNCHES, _INSTANCE, _GPU, _RANK)
NODE_VARIABLES = (
    *_FIRST,
    replace(_RUN, hidden=True),
    replace(_LAUNCHES, hidden=True),
    _ANY_INSTANCE,
    _ANY_GPU,
    replace(_RANK, hidden=True),
)
ALL_VARIABLES = (*_FIRST, _RUN, _LAUNCHES, _ANY_INSTANCE, _ANY_GPU, _RANK)


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark on the time axis of all panels, where `expr` has a value.

    With `at_value`, the mark is at the time that the value gives, in ms since 1970.
    """

    name: str
    expr: str
    text: str
    color: str
    at_value: bool = False


OOM_MARK = Mark(
    "Out of memory",
    NEWEST_OOM_OF_RUN,
    "{{run}} rank {{rank}} on {{instance}} GPU {{gpu}}",
    colors.FAILED,
    at_value=True,
)
START_MARK = Mark(
    "Start",
    began(select(recorded.LIVE)),
    "Ranks of {{run}} started",
    colors.GOOD,
)
END_MARK = Mark(
    "Killed or failed",
    began(
        append_matcher(select(catalog.PROCESS_STATE), 'state=~"killed|failed"'),
        equals=1,
        by=("run", "state"),
    ),
    "A rank of {{run}}: {{state}}",
    colors.STATES["failed"],
)
ALERT_MARK = Mark(
    "Alert",
    began(
        prepend_matcher(select(recorded.ALERTS, alertstate="firing"), TORCHMEM_ALERTS),
        by=("run", "alertname"),
    ),
    "{{alertname}} {{run}}",
    colors.ATTENTION,
)
ADVICE_MARK = Mark(
    "Advice",
    began(
        append_matcher(select(catalog.PROCESS_INFO), f'{ADVICE_LABEL}!=""'),
        by=("run", ADVICE_LABEL),
    ),
    f"{{{{run}}}} started with advice: {{{{{ADVICE_LABEL}}}}}",
    colors.NOTICE,
)
_DROPPED = select(catalog.HOOKS_DROPPED)
HOOK_MARK = Mark(
    "Pressure hook dropped",
    f"sum by (run, launch, rank, fault) ({_DROPPED} - {_DROPPED} offset 1m) > 0",
    "{{run}} rank {{rank}} no longer calls a pressure hook: {{fault}}",
    colors.ATTENTION,
)
MARKS_OF_RANKS = (OOM_MARK, START_MARK, ADVICE_MARK, END_MARK, ALERT_MARK, HOOK_MARK)


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a title. A `collapsed` row loads its panels when it is opened."""

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """The content of a dashboard."""

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]
    marks: Sequence[Mark] = field(default=())
    since: str = "now-1h"


def link(uid: str, title: str, *, at: str = "", **columns: str) -> tuple[str, str]:
    """Return title and URL of a link to another dashboard, with the same time range.

    `columns` sets its variables from columns of the row in which the link is. With `at`, the range
    is the half hour around the time in that column.
    """
    variables = "".join(
        f"&var-{name}=${{__data.fields[{column!r}]:percentencode}}"
        for name, column in columns.items()
    )
    around = f"time=${{__data.fields[{at!r}].numeric}}&time.window=1800000"
    time = around if at else "${__url_time_range}"
    return f"Open {title}", f"/d/{uid}?{time}&${{datasource:queryparam}}{variables}"


# The page of an alert, from the cell with its name: a URL, or a path of Prometheus, which Grafana
# reaches for every user that may query it.
_RUNBOOKS = thresholds.defaults().values["runbooks_at"]
_AT = (
    f"/api/datasources/proxy/uid/${{datasource:raw}}{_RUNBOOKS}"
    if _RUNBOOKS[0] == "/"
    else _RUNBOOKS
)
LINK_TO_RUNBOOK = ("Open the runbook", f"{_AT}/${{__value.raw}}.md")

# The board "Kubernetes / Compute Resources / Pod" of kubernetes-mixin and kube-prometheus-stack,
# whose uid is the MD5 of its file name, from a row with the columns Namespace and Pod.
_POD_BOARD = "6581e46e4e5c7ba40a07646395ef7b23"
_POD = (
    f"/d/{_POD_BOARD}?${{__url_time_range}}&${{datasource:queryparam}}&${{cluster:queryparam}}"
    "&var-namespace=${__data.fields['Namespace']:percentencode}"
    "&var-pod=${__value.raw:percentencode}"
)
LINK_TO_POD = ("Open the pod", _POD)


def _explore(query: str) -> str:
    """Return the URL of Grafana's Explore with a query."""
    pane = {
        "datasource": "DATASOURCE",
        "queries": [{"refId": "A", "expr": query, "instant": True, "range": False}],
        "range": {"from": "FROM", "to": "TO"},
    }
    text = quote(json.dumps({"torchmem": pane}))
    variables = {"DATASOURCE": "${datasource:raw}", "FROM": "${__from}", "TO": "${__to}"}
    for name, variable in {**variables, "VALUE": "${__value.raw:percentencode}"}.items():
        text = text.replace(name, variable)
    return f"/explore?schemaVersion=1&panes={text}"


# No board for Slurm is installed everywhere: Explore shows the job's processes on all nodes.
LINK_TO_SLURM_JOB = (
    "Show the processes of the Slurm job",
    _explore(f'last_over_time({catalog.NVML_PROCESS_INFO.name}{{slurm_job_id="VALUE"}}[1h])'),
)

SCHEDULED = ("slurm_job_id", "pod", "namespace")


def scheduled(query: str) -> list[Column]:
    """Return the columns of Slurm job and pod; Grafana leaves out those without data."""
    return [
        Column("Slurm job", query, label="slurm_job_id", link=LINK_TO_SLURM_JOB),
        Column("Pod", query, label="pod", link=LINK_TO_POD),
        Column("Namespace", query, label="namespace", unseen=True),
    ]


LINK_TO_RUN = link(TRAINING, "Training memory", run="Run")
LINK_TO_LAUNCH = link(TRAINING, "Training memory", run="Run", launch="Launch")
LINK_TO_RANK = link(TRAINING, "Training memory", run="Run", launch="Launch", rank="Rank")
LINK_TO_NODE = link(NODE, "GPU node", instance="Node")


def dashboard(board: Board, siblings: Mapping[str, str]) -> Json:
    """Return the JSON that Grafana provisions.

    `siblings` are the titles of all dashboards by uid; the dashboard links to each of them.
    """
    builder = (
        builders.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .timezone("browser")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time(board.since, "now")
        .refresh("30s")
        .links([_link(uid, title) for uid, title in siblings.items() if uid != board.uid])
        .annotations([_annotation(mark) for mark in board.marks])
        .with_variable(
            builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for variable in board.variables:
        builder.with_variable(_variable(variable))
    for row in board.rows:
        _add_row(builder, row)
    return _cleaned(json.loads(JSONEncoder(sort_keys=True).encode(builder.build())))


def _add_row(builder: builders.Dashboard, row: Row) -> None:
    title = builders.Row(row.title)
    if row.collapsed:
        for panel in row.panels:
            title.with_panel(panel)
    builder.with_row(title)
    if not row.collapsed:
        for panel in row.panels:
            builder.with_panel(panel)


def _link(uid: str, title: str) -> builders.DashboardLink:
    to_dashboard = builders.DashboardLink(title).type(models.DashboardLinkType.LINK)
    to_dashboard.icon("dashboard").url(f"/d/{uid}").include_vars(True).keep_time(True)
    return to_dashboard.tooltip(f"Open {title} with the same selection and time range")


def _annotation(mark: Mark) -> builders.AnnotationQuery:
    annotation = builders.AnnotationQuery().name(mark.name).datasource(DATASOURCE).enable(True)
    annotation.icon_color(mark.color).expr(mark.expr).use_value_for_time(mark.at_value)
    return annotation.title_format(mark.name).text_format(mark.text)


def _variable(variable: Variable) -> builders.QueryVariable:
    builder = builders.QueryVariable(variable.name).label(variable.label)
    builder.query(variable.query).regex(variable.regex).datasource(DATASOURCE)
    builder.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    if variable.sort:
        builder.sort(models.VariableSort.NATURAL_ASC)
    if variable.hidden:
        builder.hide(models.VariableHide.HIDE_VARIABLE)
    if variable.single is not None:
        single = variable.single
        return builder.current(models.VariableOption(selected=True, text=single, value=single))
    if not variable.all:
        return builder.multi(True)
    builder.multi(True).include_all(True).current(ALL)
    return builder.all_value(variable.every) if variable.every else builder


def _cleaned(board: Json) -> Json:
    """Number the panels and remove what the generator adds but Grafana's own types lack."""
    panels, templating = board["panels"], board["templating"]
    annotations, links = board.get("annotations", {}), board.get("links", [])
    if not (
        isinstance(panels, list)
        and isinstance(templating, dict)
        and isinstance(annotations, dict)
        and isinstance(links, list)
    ):
        raise TypeError("the JSON lacks panels or variables: grafana-foundation-sdk has changed")
    for number, panel in enumerate(_with_nested(panels), start=1):
        panel["id"] = number
        if panel["type"] == "table":
            panel["options"].pop("footer", None)
    _close_gaps(panels)
    for variable in templating["list"]:
        for key in ("auto", "auto_count", "auto_min"):
            variable.pop(key, None)
    # With this key Grafana 12 hides them in a menu; without it, they are above the panels.
    for item in [*annotations.get("list", ()), *links]:
        item.pop("placement", None)
    return board


def _with_nested(panels: list[Any]) -> Iterator[Any]:
    """Yield all panels, also those in collapsed rows."""
    for panel in panels:
        yield panel
        yield from panel.get("panels") or ()


def _close_gaps(panels: list[Any]) -> None:
    """Move up what follows a collapsed row: its panels take no room until it is opened."""
    hidden = 0
    for panel in panels:
        nested = panel.get("panels") or ()
        for each in (panel, *nested):
            each["gridPos"]["y"] -= hidden
        places = [each["gridPos"] for each in nested]
        below = panel["gridPos"]["y"] + panel["gridPos"]["h"]
        hidden += max((place["y"] + place["h"] for place in places), default=below) - below
