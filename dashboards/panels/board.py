"""Whole dashboards: variables, rows, links to each other, marks on the time axis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dashboards.panels.style import DATASOURCE, Json, Panel
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models

TAG = "torchmem"
ALL = models.VariableOption(selected=True, text=["All"], value=["$__all"])


@dataclass(frozen=True, slots=True)
class Choice:
    """A variable of the dashboard: its label on screen and Grafana's query for its values.

    `hidden` ones change nothing here: they carry the choice on to the next dashboard. `single` is the value of a
    variable that holds one value and starts with this one.
    """

    name: str
    label: str
    query: str
    regex: str = ""
    hidden: bool = False
    single: str | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """A mark on the time axis of all panels: `expr` gives its moment in milliseconds since 1970."""

    name: str
    expr: str
    text: str
    color: str


@dataclass(frozen=True, slots=True)
class Board:
    """What a dashboard is, before Grafana's words: `rows` by their title, in order."""

    uid: str
    title: str
    description: str
    choices: Sequence[Choice]
    rows: Mapping[str, Sequence[Panel]]
    notes: Sequence[Note] = field(default=())
    since: str = "now-1h"


def dashboard(board: Board, siblings: Mapping[str, str]) -> Json:
    """The JSON that Grafana provisions; `siblings` are the titles of all dashboards by uid, for the links above it."""
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
        .annotations([_annotation(note) for note in board.notes])
        .with_variable(
            builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for choice in board.choices:
        builder.with_variable(_variable(choice))
    for row_title, panels in board.rows.items():
        builder.with_row(builders.Row(row_title))
        for panel in panels:
            builder.with_panel(panel)
    return _cleaned(json.loads(JSONEncoder(sort_keys=True).encode(builder.build())))


def _link(uid: str, title: str) -> builders.DashboardLink:
    link = (
        builders.DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .icon("dashboard")
        .url(f"/d/{uid}")
    )
    return (
        link.include_vars(True)
        .keep_time(True)
        .tooltip(f"Open {title} with the same choice and time")
    )


def _annotation(note: Note) -> builders.AnnotationQuery:
    query = (
        builders.AnnotationQuery()
        .name(note.name)
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color(note.color)
    )
    return (
        query.expr(note.expr)
        .use_value_for_time(True)
        .title_format(note.name)
        .text_format(note.text)
    )


def _variable(choice: Choice) -> builders.QueryVariable:
    variable = (
        builders.QueryVariable(choice.name)
        .label(choice.label)
        .query(choice.query)
        .regex(choice.regex)
        .datasource(DATASOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
    )
    if choice.hidden:
        variable.hide(models.VariableHide.HIDE_VARIABLE)
    if choice.single is not None:
        return variable.current(
            models.VariableOption(selected=True, text=choice.single, value=choice.single)
        )
    return variable.multi(True).include_all(True).all_value(".*").current(ALL)


def _cleaned(board: Json) -> Json:
    """Give every panel its number and drop what the generator adds and Grafana's own types do not know."""
    panels, templating, annotations = (
        board["panels"],
        board["templating"],
        board.get("annotations", {}),
    )
    links = board.get("links")
    if not (
        isinstance(panels, list) and isinstance(templating, dict) and isinstance(annotations, dict)
    ):
        raise TypeError(
            "the generator's JSON has no list of panels or no variables: grafana-foundation-sdk has changed"
        )
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
        if panel["type"] == "table":
            panel["options"].pop("footer", None)
    for variable in templating["list"]:
        for key in ("auto", "auto_count", "auto_min"):
            variable.pop(key, None)
    # Without this word they stand above the panels; with it Grafana 12 hides them in a menu.
    for shown in [*annotations.get("list", ()), *(links if isinstance(links, list) else ())]:
        shown.pop("placement", None)
    return board
