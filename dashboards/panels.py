"""Panels in the house style: stats, lines, stacks, heat maps, state timelines, and tables.

One color has one meaning on every dashboard: red is what failed, orange is what needs attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grafana_foundation_sdk.builders import (
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    statushistory,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.prometheus import PromQueryFormat


class Unit:
    """Grafana's units, by what they measure here."""

    BYTES = units.BytesIEC
    BYTES_PER_SECOND = units.BytesPerSecondIEC
    RATIO = units.PercentUnit
    SECONDS = units.Seconds
    COUNT = units.Short
    NUMBER = units.NoUnit
    PER_MINUTE = units.CountsPerMinute
    AGO = units.DateTimeFromNow
    WATTS = units.Watt
    CELSIUS = units.Celsius
    HERTZ = units.Hertz


NEUTRAL = "text"
ATTENTION = "orange"
FAILED = "red"

STATES = {
    "running": "green",
    "stalled": "yellow",
    "exited": "text",
    "failed": "light-red",
    "oom": FAILED,
    "killed": ATTENTION,
}
SEVERITIES = {"critical": FAILED, "warning": ATTENTION, "info": "blue"}
CAUSES = {
    "capacity": "blue",
    "fragmentation": "orange",
    "limit": "purple",
    "external": "yellow",
    "pending": "light-orange",
    "library": "light-purple",
}

# The parts of a device's memory, as gpu:torchmem_memory_bytes:sum names them: legend and color.
PARTS = {
    "in_use": ("In use by tensors", "blue"),
    "stranded": ("Stranded", "orange"),
    "releasable": ("Cached, releasable", "light-blue"),
    "private_pools": ("Free in private pools", "purple"),
    "cached": ("Cached, no snapshot yet", "super-light-blue"),
    "outside_allocator": ("Outside the allocator", "yellow"),
    "other_processes": ("Other processes", "semi-dark-yellow"),
    "driver": ("Driver", "dark-purple"),
    "not_pytorch": ("Not PyTorch (no NVML)", "#8e8e8e"),
    "free": ("Free", "super-light-green"),
}
PARTS_EXPLAINED = (
    "In use: tensors of the ranks. Stranded: cached by PyTorch, but pinned between live blocks. "
    "Cached, releasable: whole free segments, which the allocator returns when it needs to. "
    "Outside the allocator: CUDA context, NCCL, cuBLAS. Only live processes count."
)

# Legends of a series of one rank, and of one GPU.
RANK = "{{run}} rank {{rank}}"
GPU = "{{instance}} GPU {{gpu}}"

# Columns of a heat map: narrower cells are hard to hit, and Grafana draws one point per pixel.
MAX_POINTS = 120

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
Json = dict[str, object]
Panel = (
    heatmap.Panel
    | stat.Panel
    | statetimeline.Panel
    | statushistory.Panel
    | table.Panel
    | timeseries.Panel
)
P = TypeVar(
    "P",
    heatmap.Panel,
    stat.Panel,
    statetimeline.Panel,
    statushistory.Panel,
    table.Panel,
    timeseries.Panel,
)


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, the legend of its series, and a color if the series has its own."""

    expr: str
    legend: str = ""
    color: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a panel: title, explanation for a newcomer, and the message without data."""

    title: str
    description: str
    empty: str = "No data: no rank matches the selection"


def stat_panel(
    text: Text,
    query: Query,
    unit: str,
    *,
    warn_above: float | None = None,
    colors: Mapping[str, str] | None = None,
) -> stat.Panel:
    """Return one number per series, neutral except from `warn_above` on or by name in `colors`."""
    warned = [] if warn_above is None else [(warn_above, ATTENTION)]
    mode = models.BigValueTextMode.VALUE_AND_NAME if query.legend else models.BigValueTextMode.AUTO
    panel = (
        _framed(stat.Panel(), text, unit, span=4, height=4)
        .graph_mode(models.BigValueGraphMode.NONE)
        .color_mode(models.BigValueColorMode.VALUE)
        .text_mode(mode)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_steps((None, NEUTRAL), *warned))
        .with_target(_target(query, 0).instant())
    )
    for name, color in (colors or {}).items():
        panel.override_by_name(name, [_fixed_color(color)])
    return panel


def lines(
    text: Text, queries: Sequence[Query], unit: str, *, mark: float | None = None
) -> timeseries.Panel:
    """Return lines over time, with a dashed line at the value `mark`."""
    panel = (
        _framed(timeseries.Panel(), text, unit, span=12, height=8)
        .min(0)
        .line_width(1)
        .fill_opacity(0)
    )
    panel.show_points(models.VisibilityMode.NEVER).legend(_legend())
    panel.tooltip(
        common.VizTooltipOptions()
        .mode(models.TooltipDisplayMode.MULTI)
        .sort(models.SortOrder.DESCENDING)
    )
    for index, query in enumerate(queries):
        panel.with_target(_target(query, index))
        if query.color:
            panel.override_by_name(query.legend, [_fixed_color(query.color)])
    return _marked(panel, mark) if mark is not None else panel


def _marked(panel: timeseries.Panel, value: float) -> timeseries.Panel:
    dashed = common.GraphThresholdsStyleConfig().mode(models.GraphThresholdsStyleMode.DASHED)
    steps = _steps((None, "transparent"), (value, ATTENTION))
    return panel.thresholds(steps).thresholds_style(dashed)


def bars(text: Text, queries: Sequence[Query], unit: str) -> timeseries.Panel:
    """Return stacked bars over time, for events and other values that add up."""
    panel = (
        lines(text, queries, unit)
        .draw_style(models.GraphDrawStyle.BARS)
        .fill_opacity(70)
        .line_width(0)
    )
    return panel.stacking(_stacked())


def memory_stack(
    text: Text, part: Callable[[str], str], total: Query, repeat: str | None = None
) -> timeseries.Panel:
    """Return the PARTS of devices as areas that add up to the dashed line `total`.

    `part` returns the expression of a part. `repeat` is a variable: one panel for each value.
    """
    areas = [Query(part(name), legend, color) for name, (legend, color) in PARTS.items()]
    panel = (
        lines(text, [*areas, total], Unit.BYTES).span(24).height(10).fill_opacity(70).line_width(0)
    )
    panel.stacking(_stacked()).tooltip(
        common.VizTooltipOptions().mode(models.TooltipDisplayMode.MULTI)
    )
    panel.override_by_name(total.legend, _dashed_line())
    return panel.repeat(repeat).repeat_direction("h").max_per_row(2) if repeat else panel


def _dashed_line() -> list[dashboard_models.DynamicConfigValue]:
    value = dashboard_models.DynamicConfigValue
    return [
        _fixed_color(NEUTRAL),
        value("custom.stacking", {"mode": "none", "group": "A"}),
        value("custom.fillOpacity", 0),
        value("custom.lineWidth", 2),
        value("custom.lineStyle", {"fill": "dash", "dash": [10, 10]}),
    ]


def _stacked() -> common.StackingConfig:
    return common.StackingConfig().mode(models.StackingMode.NORMAL).group("A")


def grid(text: Text, query: Query, unit: str, *, darkest: float | None = None) -> Panel:
    """Return a row per series, darker where it is higher; `darkest` is the upper bound."""
    shades = builders.FieldColor().mode(dashboard_models.FieldColorModeId.CONTINUOUS_BLUES)
    panel = _framed(statushistory.Panel(), text, unit, span=12, height=9).min(0)
    panel.color_scheme(shades).show_value(models.VisibilityMode.NEVER)
    panel.row_height(0.95).fill_opacity(90).line_width(0)
    panel.legend(_legend(visible=False)).tooltip(_single_tooltip())
    panel.max_data_points(MAX_POINTS).with_target(_target(query, 0))
    return panel if darkest is None else panel.max(darkest)


def state_timeline(text: Text, query: Query, names: Mapping[int, tuple[str, str]]) -> Panel:
    """Return one row per series; `names` gives each value a name and a color."""
    options = {
        str(value): dashboard_models.ValueMappingResult(text=name, color=color, index=index)
        for index, (value, (name, color)) in enumerate(names.items())
    }
    fixed = builders.FieldColor().mode(dashboard_models.FieldColorModeId.FIXED)
    panel = _framed(statetimeline.Panel(), text, units.NoUnit, span=24, height=8)
    panel.fill_opacity(80).line_width(0)
    panel.show_value(models.VisibilityMode.NEVER).row_height(0.85).merge_values(True)
    panel.legend(_legend()).tooltip(_single_tooltip()).color_scheme(fixed.fixed_color("text"))
    panel.mappings([dashboard_models.ValueMap(options=options)])
    return panel.with_target(_target(query, 0))


def bucket_heatmap(text: Text, query: Query, unit: str) -> heatmap.Panel:
    """Return a heat map of a histogram; `unit` is that of the bucket bounds."""
    colors = (
        heatmap.HeatmapColorOptions()
        .mode(heatmap_models.HeatmapColorMode.SCHEME)
        .scheme("Blues")
        .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
    )
    panel = _framed(heatmap.Panel(), text, units.Short, span=12, height=8)
    panel.calculate(False).color(colors).y_axis(heatmap.YAxisConfig().unit(unit))
    panel.filter_values(heatmap.FilterValueRange().le(0.5))
    target = _target(Query(query.expr, "{{le}}"), 0)
    return panel.with_target(target.format(PromQueryFormat.HEATMAP))


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: the values of `query`, its label `label`, or a label of all queries.

    `names` are displayed instead of values, `colors` are their colors, `link` is the title and URL
    that a click opens. A `bar` fills the cell in proportion to a value from 0 to 1.
    """

    heading: str
    query: str | None = None
    label: str | None = None
    unit: str | None = None
    colors: Mapping[str, str] | None = None
    names: Mapping[str, str] | None = None
    link: tuple[str, str] | None = None
    bar: bool = False
    width: int | None = None


def joined_table(
    text: Text, columns: Sequence[Column], *, sort: str = "", descending: bool = False
) -> table.Panel:
    """Return a table with a row for each label set of the queries, sorted by the heading `sort`."""
    panel = _framed(table.Panel(), text, units.Short, span=24, height=9)
    arranged = dashboard_models.DataTransformerConfig("organize", options=_arrangement(columns))
    panel.with_transformation(dashboard_models.DataTransformerConfig("merge", options={}))
    panel.with_transformation(arranged)
    for index, query in enumerate(_column_queries(columns)):
        panel.with_target(_target(Query(query), index).instant().format(PromQueryFormat.TABLE))
    for column in columns:
        if style := _column_style(column):
            panel.override_by_name(column.heading, style)
    if sort:
        panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(descending)])
    return panel


def _column_queries(columns: Sequence[Column]) -> list[str]:
    """Return each query once, also where several columns display its labels."""
    return list(dict.fromkeys(column.query for column in columns if column.query))


def _arrangement(columns: Sequence[Column]) -> Json:
    """Return the options of Grafana's `organize`: the fields to display, their order and names."""
    values = {
        query: f"Value #{_letter(index)}" for index, query in enumerate(_column_queries(columns))
    }
    fields = [column.label or values[column.query or ""] for column in columns]
    hidden = [name for name in ("Time", "uuid", *values.values()) if name not in fields]
    headings = [column.heading for column in columns]
    return {
        "excludeByName": dict.fromkeys(hidden, True),
        "indexByName": {name: index for index, name in enumerate(fields)},
        "renameByName": dict(zip(fields, headings, strict=True)),
    }


def _column_style(column: Column) -> list[dashboard_models.DynamicConfigValue]:
    style: dict[str, object] = {}
    if column.unit:
        style["unit"] = column.unit
    if column.colors or column.names:
        style["mappings"] = [{"type": "value", "options": _value_mappings(column)}]
    if column.colors:
        style["custom.cellOptions"] = {"type": "color-text"}
    if column.bar:
        style |= {"min": 0, "max": 1, "color": {"mode": "fixed", "fixedColor": "blue"}}
        style["custom.cellOptions"] = {"type": "gauge", "mode": "basic"}
    if column.link:
        title, url = column.link
        style["links"] = [{"title": title, "url": url}]
    if column.width:
        style["custom.width"] = column.width
    return [dashboard_models.DynamicConfigValue(name, value) for name, value in style.items()]


def _value_mappings(column: Column) -> dict[str, dict[str, str]]:
    colors, names = column.colors or {}, column.names or {}
    return {
        value: {"text": names.get(value, value)}
        | ({"color": colors[value]} if value in colors else {})
        for value in {**names, **colors}
    }


def _framed(panel: P, text: Text, unit: str, span: int, height: int) -> P:
    """Set text, unit and size; `span` is of 24 columns, `height` in Grafana's rows of 30 pixels."""
    panel.title(text.title).description(text.description).no_value(text.empty)
    panel.datasource(DATASOURCE).unit(unit).span(span).height(height)
    return panel


def _target(query: Query, index: int) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(DATASOURCE).expr(query.expr)
    target.ref_id(_letter(index)).range()
    return target.legend_format(query.legend) if query.legend else target


def _letter(index: int) -> str:
    """Return the letter by which Grafana identifies a query."""
    return chr(ord("A") + index)


def _fixed_color(color: str) -> dashboard_models.DynamicConfigValue:
    return dashboard_models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})


def _steps(*values: tuple[float | None, str]) -> builders.ThresholdsConfig:
    """Return the colors that apply from each value on; the first value is None."""
    thresholds = [dashboard_models.Threshold(value=value, color=color) for value, color in values]
    absolute = dashboard_models.ThresholdsMode.ABSOLUTE
    return builders.ThresholdsConfig().mode(absolute).steps(thresholds)


def _legend(*, visible: bool = True) -> common.VizLegendOptions:
    """Return a legend below the panel."""
    below = common.VizLegendOptions().placement(models.LegendPlacement.BOTTOM)
    return below.display_mode(models.LegendDisplayMode.LIST).show_legend(visible)


def _single_tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(models.TooltipDisplayMode.SINGLE)
