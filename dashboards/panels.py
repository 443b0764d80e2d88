"""The house style of all panels and dashboards; the only file that knows grafana_foundation_sdk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

BYTES = units.BytesIEC
RATIO = units.PercentUnit
SECONDS = units.Seconds
COUNT = units.Short
NUMBER = units.NoUnit
PER_MINUTE = units.CountsPerMinute
AGO = units.DateTimeFromNow

Json = dict[str, object]
Panel = heatmap.Panel | stat.Panel | table.Panel | timeseries.Panel

DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
NEUTRAL = "text"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, the legend of its series, and a fixed colour where the series has a meaning of its own."""

    expr: str
    legend: str = ""
    color: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """What a reader sees around the data: title, explanation for a newcomer, and what stands there without data."""

    title: str
    description: str
    empty: str = "No data: no rank matches the choice above"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: the values of `query`, or its label `label`, or a label that all queries share."""

    heading: str
    query: str | None = None
    label: str | None = None
    unit: str | None = None
    colors: Mapping[str, str] | None = None


def stat_panel(
    text: Text, query: Query, unit: str, *, warn_above: float | None = None, colors: Mapping[str, str] | None = None
) -> stat.Panel:
    """One number per series. It is neutral unless `warn_above` or the colour of a series says otherwise."""
    steps = [models.Threshold(value=None, color=NEUTRAL)]
    if warn_above is not None:
        steps.append(models.Threshold(value=warn_above, color="orange"))
    panel = (
        stat.Panel()
        .title(text.title)
        .description(text.description)
        .no_value(text.empty)
        .datasource(DATASOURCE)
        .unit(unit)
        .span(4)
        .height(4)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .text_mode(
            common_models.BigValueTextMode.VALUE_AND_NAME if query.legend else common_models.BigValueTextMode.AUTO
        )
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(_target(query, 0).instant())
    )
    for name, color in (colors or {}).items():
        panel.override_by_name(name, [_fixed_color(color)])
    return panel


def lines(text: Text, queries: Sequence[Query], unit: str, *, mark: float | None = None) -> timeseries.Panel:
    """Lines over time; `mark` draws a dashed line at a value that matters."""
    panel = (
        timeseries.Panel()
        .title(text.title)
        .description(text.description)
        .no_value(text.empty)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .span(12)
        .height(8)
        .line_width(1)
        .fill_opacity(0)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    for index, query in enumerate(queries):
        panel.with_target(_target(query, index))
        if query.color:
            panel.override_by_name(query.legend, [_fixed_color(query.color)])
    return _marked(panel, mark) if mark is not None else panel


def _marked(panel: timeseries.Panel, value: float) -> timeseries.Panel:
    steps = [models.Threshold(value=None, color="transparent"), models.Threshold(value=value, color="orange")]
    dashed = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
    thresholds = builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    return panel.thresholds(thresholds).thresholds_style(dashed)


def stack(text: Text, queries: Sequence[Query], unit: str, total: Query, repeat: str) -> timeseries.Panel:
    """Areas that add up to the dashed line `total`; one panel for each value of the variable `repeat`."""
    panel = lines(text, [*queries, total], unit).span(24).height(10).fill_opacity(70).line_width(0)
    panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    panel.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    panel.override_by_name(
        total.legend,
        [
            models.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
            models.DynamicConfigValue("custom.fillOpacity", 0),
            models.DynamicConfigValue("custom.lineWidth", 2),
            models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
        ],
    )
    return panel.repeat(repeat).repeat_direction("h").max_per_row(2)


def bucket_heatmap(text: Text, query: Query, unit: str) -> heatmap.Panel:
    """Cells coloured by the count of a histogram's bucket; `unit` is that of the bucket bounds."""
    target = _target(Query(query.expr, "{{le}}"), 0).format(PromQueryFormat.HEATMAP)
    return (
        heatmap.Panel()
        .title(text.title)
        .description(text.description)
        .no_value(text.empty)
        .datasource(DATASOURCE)
        .unit(COUNT)
        .span(12)
        .height(8)
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .filter_values(heatmap.FilterValueRange().le(0.5))
        .with_target(target)
    )


def joined_table(text: Text, columns: Sequence[Column]) -> table.Panel:
    """One row per label set that the queries of the columns share, columns in the given order."""
    panel = (
        table.Panel()
        .title(text.title)
        .description(text.description)
        .no_value(text.empty)
        .datasource(DATASOURCE)
        .unit(COUNT)
        .span(24)
        .height(9)
        .with_transformation(models.DataTransformerConfig("merge", options={}))
        .with_transformation(models.DataTransformerConfig("organize", options=_arrangement(columns)))
    )
    for index, query in enumerate(_column_queries(columns)):
        panel.with_target(_target(Query(query), index).instant().format(PromQueryFormat.TABLE))
    for column in columns:
        if style := _column_style(column):
            panel.override_by_name(column.heading, style)
    return panel


def _column_queries(columns: Sequence[Column]) -> list[str]:
    return [column.query for column in columns if column.query]


def _arrangement(columns: Sequence[Column]) -> Json:
    """Options of Grafana's `organize`: which fields of the joined frame are shown, in which order, under which name."""
    values = {query: f"Value #{_ref(index)}" for index, query in enumerate(_column_queries(columns))}
    shown = [column.label or values[column.query or ""] for column in columns]
    return {
        "excludeByName": {name: True for name in ("Time", "uuid", *values.values()) if name not in shown},
        "indexByName": {name: index for index, name in enumerate(shown)},
        "renameByName": {name: column.heading for name, column in zip(shown, columns, strict=True)},
    }


def _column_style(column: Column) -> list[models.DynamicConfigValue]:
    style = []
    if column.unit:
        style.append(models.DynamicConfigValue("unit", column.unit))
    if column.colors:
        options = {text: {"text": text, "color": color} for text, color in column.colors.items()}
        style.append(models.DynamicConfigValue("mappings", [{"type": "value", "options": options}]))
        style.append(models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}))
    return style


def _target(query: Query, index: int) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(DATASOURCE).expr(query.expr).ref_id(_ref(index)).range()
    return target.legend_format(query.legend) if query.legend else target


def _ref(index: int) -> str:
    return chr(ord("A") + index)


def _fixed_color(color: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})


@dataclass(frozen=True, slots=True)
class Choice:
    """A variable of the dashboard: its label on screen and Grafana's query for its values."""

    name: str
    label: str
    query: str
    regex: str = ""


def dashboard(
    uid: str, title: str, description: str, choices: Sequence[Choice], rows: Mapping[str, Sequence[Panel]]
) -> Json:
    """A whole dashboard, as the JSON that Grafana provisions."""
    builder = (
        builders.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["torchmem"])
        .timezone("browser")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("10s")
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for choice in choices:
        builder.with_variable(_variable(choice))
    for row_title, panels in rows.items():
        builder.with_row(builders.Row(row_title))
        for panel in panels:
            builder.with_panel(panel)
    return _cleaned(json.loads(JSONEncoder(sort_keys=True).encode(builder.build())))


def _variable(choice: Choice) -> builders.QueryVariable:
    return (
        builders.QueryVariable(choice.name)
        .label(choice.label)
        .query(choice.query)
        .regex(choice.regex)
        .datasource(DATASOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _cleaned(board: Json) -> Json:
    """Give every panel its number and drop what the generator adds and Grafana's own types do not know."""
    panels, templating = board["panels"], board["templating"]
    if not isinstance(panels, list) or not isinstance(templating, dict):
        raise TypeError(
            "the generator's JSON has no list of panels or no variables: grafana-foundation-sdk has changed"
        )
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    for variable in templating["list"]:
        for key in ("auto", "auto_count", "auto_min"):
            variable.pop(key, None)
    return board
