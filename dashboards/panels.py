"""Panels in the house style: stats, lines, stacks, heat maps, state timelines, and tables.

What a panel asks is its `description`; `no_value` is what it shows instead of data.
One color has one meaning on every dashboard: torchmem.metrics.colors has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dashboards.colors import Levels, Steps
from dashboards.queries import band, ranks_in, worst
from grafana_foundation_sdk.builders import (
    common,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from torchmem.metrics import colors
from torchmem.metrics.memory_parts import COMPONENTS, PARTS
from torchmem.sample.sample import ASLEEP


class Unit:
    """Grafana's units, by what they measure here."""

    BYTES = units.BytesIEC
    BYTES_PER_SECOND = units.BytesPerSecondIEC
    RATIO = units.PercentUnit
    SECONDS = units.Seconds
    DURATION = units.DurationSeconds
    COUNT = units.Short
    NUMBER = units.NoUnit
    TEXT = units.String
    PER_MINUTE = "suffix:per min"
    GIB_PER_MINUTE = "suffix:GiB/min"
    AGO = units.DateTimeFromNow
    KILOWATT_HOURS = units.KiloWattHour
    WATTS = units.Watt
    CELSIUS = units.Celsius
    HERTZ = units.Hertz


NEUTRAL = "text"

PARTS_EXPLAINED = (
    "In use: tensors of the ranks. Stranded: cached by PyTorch, but pinned between live blocks. "
    "Cached, releasable: whole free segments, which the allocator returns when it needs to. "
    "Outside the allocator: CUDA context, NCCL, cuBLAS. Only live processes count."
)

ASLEEP_TITLE = "Asleep, given back"

# Legends of a rank on dashboards of one run and of several. The palette goes by a hash of the name,
# so a rank has the same color in all panels; these names get clear ones.
RANK = "rank #{{rank}}"
RUN_RANK = "{{run}} rank #{{rank}}"

# Columns of a heat map: narrower cells are hard to hit, and Grafana draws one point per pixel.
MAX_POINTS = 120
# Of a column of wrapped text: the tables then fit into a window of 1280 pixels.
MIN_WRAPPED = 218
# Of a column of names: 20 characters fit. Grafana breaks a wrapped one only after a hyphen.
NAME_WIDTH = 152
# Rows of a timeline on one page: with more, their names overlap.
MAX_ROWS = 10

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
Json = dict[str, object]
Panel = heatmap.Panel | stat.Panel | statetimeline.Panel | table.Panel | timeseries.Panel
P = TypeVar(
    "P",
    heatmap.Panel,
    stat.Panel,
    statetimeline.Panel,
    table.Panel,
    timeseries.Panel,
)


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, the legend of its series, and a color if they have their own."""

    expr: str
    legend: str = ""
    color: str | None = None


RANKS_BY_STATE = [Query(ranks_in(state), state, color) for state, color in colors.STATES.items()]


NO_RANK = "No data: no rank matches the selection"


def stat_panel(
    title: str,
    query: str | Query | Sequence[Query],
    unit: str,
    *,
    levels: Levels | None = None,
    empty: str = NO_RANK,
) -> stat.Panel:
    """Return one number per series: in the color of its query, or of `levels`, or neutral."""
    queries = _listed(query)
    named = any(query.legend for query in queries)
    mode = models.BigValueTextMode.VALUE_AND_NAME if named else models.BigValueTextMode.AUTO
    panel = (
        _framed(stat.Panel(), title, unit, span=4, height=3)
        .no_value(empty)
        .graph_mode(models.BigValueGraphMode.NONE)
        .color_mode(models.BigValueColorMode.VALUE)
        .text_mode(mode)
        .text(common.VizTextDisplayOptions().title_size(14).value_size(26))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(levels.steps() if levels else [(None, NEUTRAL)]))
    )
    if levels:
        panel.mappings([_no_value(empty)])
    for index, each in enumerate(queries):
        panel.with_target(_target(each, index).instant())
        _colored(panel, each, index)
    return panel.decimals(1) if unit == Unit.RATIO else panel


def _listed(query: str | Query | Sequence[Query]) -> Sequence[Query]:
    query = Query(query) if isinstance(query, str) else query
    return [query] if isinstance(query, Query) else query


def _no_value(empty: str) -> dashboard_models.SpecialValueMap:
    """Return the mapping without which no value has the color of the lowest, good or bad."""
    result = dashboard_models.ValueMappingResult(text=empty, color=NEUTRAL)
    match = dashboard_models.SpecialValueMatch.NULL_AND_NAN
    options = dashboard_models.DashboardSpecialValueMapOptions(match=match, result=result)
    return dashboard_models.SpecialValueMap(options=options)


def lines(
    title: str,
    query: Query | Sequence[Query],
    unit: str,
    *,
    mark: Levels | None = None,
    signed: bool = False,
) -> timeseries.Panel:
    """Return lines over time, from 0 up unless `signed`, with dashed lines at the levels `mark`."""
    by_name = builders.FieldColor().mode(dashboard_models.FieldColorModeId.PALETTE_CLASSIC_BY_NAME)
    panel = (
        _framed(timeseries.Panel(), title, unit, span=12, height=8)
        .line_width(1)
        .fill_opacity(0)
        .color_scheme(by_name)
    )
    if not signed:
        panel.min(0)
    panel.show_points(models.VisibilityMode.NEVER).legend(_table_legend())
    panel.tooltip(
        common.VizTooltipOptions()
        .mode(models.TooltipDisplayMode.MULTI)
        .sort(models.SortOrder.DESCENDING)
    )
    # The message without data is for the panel; a line that has ended has no last value.
    panel.override_by_regexp(".*", _styled({"noValue": "–"}))
    for index, each in enumerate(_listed(query)):
        panel.with_target(_target(each, index))
        _colored(panel, each, index)
    return _marked(panel, mark) if mark else panel


def _marked(panel: timeseries.Panel, levels: Levels) -> timeseries.Panel:
    dashed = common.GraphThresholdsStyleConfig().mode(models.GraphThresholdsStyleMode.DASHED)
    clear = [
        (value, "transparent" if color == colors.GOOD else color) for value, color in levels.steps()
    ]
    return panel.thresholds(_thresholds(clear)).thresholds_style(dashed)


def rank_lines(
    title: str,
    expression: str,
    unit: str,
    *,
    lowest: bool = False,
    mark: Levels | None = None,
) -> timeseries.Panel:
    """Return one line per rank, or with many ranks those of the worst ones and a band of all.

    `expression` has the labels of queries.of_ranks. The highest values are the worst ones, or with
    `lowest` the lowest.
    """
    ranks = Query(worst(expression, lowest=lowest), RANK)
    panel = lines_in_band(title, ranks, expression, unit, mark).height(10)
    return lowest_first(panel) if lowest else panel


def lines_in_band(
    title: str,
    worst_lines: Query,
    expression: str,
    unit: str,
    mark: Levels | None = None,
) -> timeseries.Panel:
    """Return the worst lines of `expression` and, if there are others, a band of all of them.

    Values can be below zero if zero is the level at which they have failed.
    """
    everyone = [Query(query, f"all, {name}", NEUTRAL) for name, query in band(expression).items()]
    signed = mark is not None and mark.failed == 0
    panel = lines(title, [worst_lines, *everyone], unit, mark=mark, signed=signed)
    return _shaded(panel).height(9)


def lowest_first(panel: timeseries.Panel) -> timeseries.Panel:
    """Sort the legend by the last value, the lowest first."""
    return panel.legend(_table_legend(descending=False))


def with_limit(panel: timeseries.Panel, limit: Query) -> timeseries.Panel:
    """Add a dashed line with which the lines of a panel are to be compared."""
    index = len(panel.build().targets or ())
    panel.with_target(_target(limit, index))
    return panel.override_by_query(_letter(index), _dashed_line())


def with_trend(panel: timeseries.Panel, ahead: Query, pace: Query, unit: str) -> timeseries.Panel:
    """Add a dashed line that is `ahead` of the lines of a panel, and to the legend its `pace`."""
    index = len(panel.build().targets or ())
    panel.with_target(_target(ahead, index)).with_target(_target(pace, index + 1))
    color = {"color": _fixed(colors.NOTICE)}
    dashed = {"custom.lineWidth": 2, "custom.lineStyle": {"fill": "dash", "dash": [6, 6]}}
    panel.override_by_query(_letter(index), _styled({**color, **dashed}))
    hidden = {"custom.lineWidth": 0, "custom.axisPlacement": "hidden"}
    shown = {**color, "unit": unit, "decimals": 2}
    return panel.override_by_query(_letter(index + 1), _styled({**shown, **hidden}))


def _shaded(panel: timeseries.Panel) -> timeseries.Panel:
    """Fill the area between the queries B and C, and draw D thicker."""
    hidden = {
        "custom.lineWidth": 0,
        "custom.hideFrom": {"legend": True, "tooltip": False, "viz": False},
    }
    panel.override_by_query("C", _styled(hidden))
    shade = {"custom.fillBelowTo": "all, lowest", "custom.fillOpacity": 15}
    panel.override_by_query("B", _styled({**hidden, **shade}))
    dashed = {"custom.lineStyle": {"fill": "dash", "dash": [4, 4]}}
    return panel.override_by_query("D", _styled(dashed))


def bars(title: str, queries: Sequence[Query], unit: str) -> timeseries.Panel:
    """Return stacked bars over time, for events and other values that add up."""
    panel = (
        lines(title, queries, unit)
        .draw_style(models.GraphDrawStyle.BARS)
        .fill_opacity(70)
        .line_width(0)
    )
    return panel.stacking(_stacked())


def stack(title: str, areas: Sequence[Query], total: Query, unit: str) -> timeseries.Panel:
    """Return areas over time that add up to the dashed line `total`."""
    panel = areas_only(title, [*areas, total], unit)
    return panel.override_by_query(_letter(len(areas)), _dashed_line())


def areas_only(title: str, areas: Sequence[Query], unit: str) -> timeseries.Panel:
    """Return areas over time, one above the other."""
    opacity = round(100 * colors.PART_OPACITY)
    panel = lines(title, areas, unit).fill_opacity(opacity).line_width(0)
    return panel.stacking(_stacked()).tooltip(
        common.VizTooltipOptions().mode(models.TooltipDisplayMode.MULTI)
    )


def component_stack(title: str, component: Callable[[str], str], total: Query) -> timeseries.Panel:
    """Return the COMPONENTS of active memory as areas that add up to the dashed line `total`.

    `component` returns the expression of the components that match a matcher of their label. What
    an engine has given back while it sleeps is on top, as pale as free memory.
    """
    known = "|".join([ASLEEP, *(name for name in COMPONENTS if name != "other")])
    matchers = {name: f'component="{name}"' for name in COMPONENTS}
    matchers["other"] = f'component!~"{known}"'
    areas = [
        Query(f"{component(matchers[name])} >= 1", shown.title, shown.color)
        for name, shown in COMPONENTS.items()
    ]
    matcher = f'component="{ASLEEP}"'
    areas.append(Query(f"{component(matcher)} >= 1", ASLEEP_TITLE, PARTS["free"].color))
    panel = stack(title, areas, total, Unit.BYTES).height(10)
    return pale(panel, len(areas) - 1)


def pale(panel: timeseries.Panel, index: int) -> timeseries.Panel:
    """Draw the area of a query as the background of the others."""
    paler = {"custom.fillOpacity": round(100 * colors.FREE_OPACITY)}
    return panel.override_by_query(_letter(index), _styled(paler))


def small(panel: timeseries.Panel, repeat: str) -> timeseries.Panel:
    """Repeat a panel for each value of the variable `repeat`, four in a row, the legend below."""
    repeated = panel.repeat(repeat).repeat_direction("h").max_per_row(4)
    return repeated.legend(_list_legend()).span(6).height(7)


def memory_stack(title: str, part: Callable[[str], str], total: Query) -> timeseries.Panel:
    """Return the PARTS of devices as areas that add up to the dashed line `total`.

    `part` returns the expression of a part.
    """
    areas = [Query(f"{part(name)} >= 1", shown.title, shown.color) for name, shown in PARTS.items()]
    panel = stack(title, areas, total, Unit.BYTES).span(24).height(10)
    return pale(panel, list(PARTS).index("free"))


def _dashed_line() -> list[dashboard_models.DynamicConfigValue]:
    return _styled(
        {
            "color": _fixed(NEUTRAL),
            "custom.stacking": {"mode": "none", "group": "A"},
            "custom.fillOpacity": 0,
            "custom.lineWidth": 2,
            "custom.lineStyle": {"fill": "dash", "dash": [10, 10]},
        }
    )


def _stacked() -> common.StackingConfig:
    return common.StackingConfig().mode(models.StackingMode.NORMAL).group("A")


def heat_strips(title: str, query: Query, unit: str, *, highest: float | None = None) -> Panel:
    """Return a strip per series, over time, in a sequential scale, from 0 if `highest` is given.

    Grafana sorts the strips by number if the legend is one.
    """
    scale = _sequential() if highest is None else _sequential().min(0).max(highest)
    panel = _framed(heatmap.Panel(), title, Unit.COUNT, span=12, height=10)
    panel.calculate(False).color(scale)
    panel.cell_values(heatmap.CellValues().unit(unit)).unit(unit)
    return panel.cell_gap(0).max_data_points(MAX_POINTS).with_target(_target(query, 0))


def bucket_heatmap(title: str, query: Query, unit: str) -> heatmap.Panel:
    """Return a heat map of a histogram; `unit` is that of the bucket bounds."""
    panel = _framed(heatmap.Panel(), title, Unit.COUNT, span=12, height=10)
    panel.calculate(False).color(_sequential()).y_axis(heatmap.YAxisConfig().unit(unit))
    panel.filter_values(heatmap.FilterValueRange().le(0.5))
    target = _target(Query(query.expr, "{{le}}"), 0)
    return panel.with_target(target.format(PromQueryFormat.HEATMAP)).max_data_points(MAX_POINTS)


def _sequential() -> heatmap.HeatmapColorOptions:
    """Return a scale whose lightness alone tells the values apart."""
    return (
        heatmap.HeatmapColorOptions()
        .mode(heatmap_models.HeatmapColorMode.SCHEME)
        .scheme("Viridis")
        .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
    )


def state_timeline(title: str, query: Query, names: Mapping[int, tuple[str, str]]) -> Panel:
    """Return one row per series; `names` gives each value a name and a color."""
    options = {
        str(value): dashboard_models.ValueMappingResult(text=name, color=color, index=index)
        for index, (value, (name, color)) in enumerate(names.items())
    }
    fixed = builders.FieldColor().mode(dashboard_models.FieldColorModeId.FIXED)
    panel = _framed(statetimeline.Panel(), title, Unit.NUMBER, span=24, height=9)
    panel.fill_opacity(85).line_width(0).per_page(MAX_ROWS)
    panel.show_value(models.VisibilityMode.AUTO).row_height(0.85).merge_values(True)
    panel.legend(_list_legend()).tooltip(_single_tooltip()).color_scheme(fixed.fixed_color("text"))
    panel.mappings([dashboard_models.ValueMap(options=options)])
    return panel.with_target(_target(query, 0))


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: the values of `query`, its label `label`, or a label of all queries.

    `names` are displayed instead of values. The background of a cell is by name in `colors`, or by
    number in `levels`. `link` is the title and URL that a click opens. A `bar` fills the cell in
    proportion to a value from 0 to `highest`. A label is always text. Links of other columns read
    an `unseen` one.
    """

    heading: str
    query: str | None = None
    label: str | None = None
    unit: str | None = None
    colors: Mapping[str, str] | None = None
    levels: Levels | None = None
    names: Mapping[str, str] | None = None
    link: tuple[str, str] | None = None
    bar: bool = False
    highest: float = 1
    width: int | None = None
    wrap: bool = False
    centered: bool = False
    decimals: int | None = None
    unseen: bool = False


LAUNCH_OF_LINKS = Column("Launch", label="launch", unseen=True)

# The only value of a cell, by the name of Grafana's reducer.
_AGGREGATION = "lastNotNull"


def joined_table(
    title: str,
    columns: Sequence[Column],
    *,
    sort: str = "",
    descending: bool = False,
    hidden: Sequence[str] = (),
) -> table.Panel:
    """Return a table with a row for each label set of the queries, sorted by the heading `sort`.

    `hidden` are labels that tell the rows apart but are not shown.
    """
    panel = _framed(table.Panel(), title, Unit.TEXT, span=24, height=9)
    for name, options in {
        "merge": {},
        "groupBy": _rows(columns, hidden),
        "organize": _arrangement(columns, hidden),
    }.items():
        panel.with_transformation(dashboard_models.DataTransformerConfig(name, options=options))
    for index, query in enumerate(_column_queries(columns)):
        panel.with_target(_target(Query(query), index).instant().format(PromQueryFormat.TABLE))
    # The message without data is for the panel; a blank cell stays blank.
    panel.override_by_regexp(".*", _styled({"noValue": ""}))
    for column in columns:
        if style := _column_style(column):
            panel.override_by_name(column.heading, style)
    if sort:
        panel.sort_by([common.TableSortByFieldState().display_name(sort).desc(descending)])
    return panel


def _column_queries(columns: Sequence[Column]) -> list[str]:
    """Return each query once, also where several columns display its labels."""
    return list(dict.fromkeys(column.query for column in columns if column.query))


def _values(columns: Sequence[Column]) -> dict[str, str]:
    """Return the field with the values of each query; Grafana numbers them if there are several."""
    queries = _column_queries(columns)
    names = [f"Value #{_letter(index)}" for index in range(len(queries))]
    return dict(zip(queries, names if len(queries) > 1 else ["Value"], strict=True))


def _rows(columns: Sequence[Column], unseen: Sequence[str]) -> Json:
    """Return the options of Grafana's `groupBy`: a group is a row, which has only one value each.

    It leaves out a table without labels, which has no rows; Grafana draws that one as headings, and
    no table as the message of the panel.
    """
    labels = [column.label for column in columns if column.label]
    names = _values(columns)
    values = [names[column.query] for column in columns if column.query and not column.label]
    rows = {"operation": "groupby", "aggregations": []}
    cells = {"operation": "aggregate", "aggregations": [_AGGREGATION]}
    return {
        "fields": dict.fromkeys((*labels, *unseen, "uuid"), rows) | dict.fromkeys(values, cells)
    }


def _arrangement(columns: Sequence[Column], unseen: Sequence[str]) -> Json:
    """Return the options of Grafana's `organize`: the fields to display, their order and names."""
    values = {query: f"{name} ({_AGGREGATION})" for query, name in _values(columns).items()}
    fields = [column.label or values[column.query or ""] for column in columns]
    headings = [column.heading for column in columns]
    return {
        "excludeByName": {name: True for name in ("uuid", *unseen) if name not in fields},
        "indexByName": {name: index for index, name in enumerate(fields)},
        "renameByName": dict(zip(fields, headings, strict=True)),
    }


def _column_style(column: Column) -> list[dashboard_models.DynamicConfigValue]:
    style: dict[str, object] = {}
    if not column.label:
        style["unit"] = column.unit or Unit.NUMBER
    if column.unit == Unit.RATIO:
        style["decimals"] = 1
    if column.colors or column.names or column.levels:
        style["mappings"] = [{"type": "value", "options": _value_mappings(column)}, _BLANK]
    if column.levels:
        steps = [{"value": value, "color": color} for value, color in column.levels.steps()]
        style["thresholds"] = {"mode": "absolute", "steps": steps}
        style["color"] = {"mode": "thresholds"}
    style |= _cell(column)
    if column.link:
        title, url = column.link
        style["links"] = [{"title": title, "url": url}]
    if column.unseen:
        style["custom.hidden"] = True  # before Grafana 12.3
        style["custom.hideFrom"] = {"legend": False, "tooltip": False, "viz": True}
    if column.centered:
        style["custom.align"] = "center"
    if column.decimals is not None:
        style["decimals"] = column.decimals
    if column.width:
        style["custom.width"] = column.width
    return _styled(style)


# A blank cell has the color of the lowest threshold otherwise.
_BLANK = {
    "type": "special",
    "options": {"match": "null+nan", "result": {"color": "transparent", "text": ""}},
}


def _cell(column: Column) -> dict[str, object]:
    """Return what fills the cells: a bar, a color, or wrapped text."""
    if column.bar:
        plain = {} if column.levels else {"color": _fixed(colors.NOTICE)}
        return {
            "min": 0,
            "max": column.highest,
            "decimals": 0,
            "custom.cellOptions": {"type": "gauge", "mode": "basic"},
            **plain,
        }
    if column.colors or column.levels:
        return {"custom.cellOptions": {"type": "color-background", "mode": "basic"}}
    if not column.wrap:
        return {}
    width = {} if column.width else {"custom.minWidth": MIN_WRAPPED}
    return {"custom.wrapText": True, **width}


def _value_mappings(column: Column) -> dict[str, dict[str, str]]:
    names = column.names or {}
    if not column.colors:
        return {value: {"text": text} for value, text in names.items()}
    shades = dict.fromkeys(names, "transparent") | dict(column.colors)
    return {
        value: {"text": names.get(value, value), "color": color} for value, color in shades.items()
    }


def _framed(panel: P, title: str, unit: str, span: int, height: int) -> P:
    """Set the frame; `span` is of 24 columns, `height` in Grafana's rows of 30 pixels."""
    panel.title(title).no_value(NO_RANK).datasource(DATASOURCE)
    panel.unit(unit).span(span).height(height)
    return panel


def _target(query: Query, index: int) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(DATASOURCE).expr(query.expr)
    target.ref_id(_letter(index)).range()
    return target.legend_format(query.legend) if query.legend else target


def _letter(index: int) -> str:
    """Return the letter by which Grafana identifies a query."""
    return chr(ord("A") + index)


def _colored(panel: stat.Panel | timeseries.Panel, query: Query, index: int) -> None:
    """Give the series of a query its color; by its letter, as the series may not be there."""
    if query.color:
        panel.override_by_query(_letter(index), _styled({"color": _fixed(query.color)}))


def _styled(values: Mapping[str, object]) -> list[dashboard_models.DynamicConfigValue]:
    """Return the values of an override, by Grafana's names of what they set."""
    return [dashboard_models.DynamicConfigValue(name, value) for name, value in values.items()]


def _fixed(color: str) -> Json:
    return {"mode": "fixed", "fixedColor": color}


def _thresholds(steps: Steps) -> builders.ThresholdsConfig:
    values = [dashboard_models.Threshold(value=value, color=color) for value, color in steps]
    return builders.ThresholdsConfig().mode(dashboard_models.ThresholdsMode.ABSOLUTE).steps(values)


def _list_legend() -> common.VizLegendOptions:
    """Return a legend below the panel."""
    below = common.VizLegendOptions().placement(models.LegendPlacement.BOTTOM)
    return below.display_mode(models.LegendDisplayMode.LIST).show_legend(True)


def _table_legend(*, descending: bool = True) -> common.VizLegendOptions:
    """Return a legend at the right, with the last and the highest value, sorted by the last."""
    right = common.VizLegendOptions().placement(models.LegendPlacement.RIGHT)
    right.display_mode(models.LegendDisplayMode.TABLE).show_legend(True)
    return right.calcs(["last", "max"]).sort_by("Last").sort_desc(descending)


def _single_tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(models.TooltipDisplayMode.SINGLE)
