"""What all panels share: their words, their data source, their frame."""

from __future__ import annotations

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

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


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


def framed(panel: P, text: Text, unit: str, span: int, height: int) -> P:
    """The panel with its words, unit and size; `span` is of 24 columns, `height` in Grafana's rows of 30 pixels."""
    panel.title(text.title).description(text.description).no_value(text.empty).datasource(
        DATASOURCE
    )
    panel.unit(unit).span(span).height(height)
    return panel


def target(query: Query, index: int) -> prometheus.Dataquery:
    """The query as the panel's target A, B, C, ..."""
    found = (
        prometheus.Dataquery().datasource(DATASOURCE).expr(query.expr).ref_id(ref(index)).range()
    )
    return found.legend_format(query.legend) if query.legend else found


def ref(index: int) -> str:
    """Grafana's letter of a query."""
    return chr(ord("A") + index)


def fixed_color(color: str) -> dashboard_models.DynamicConfigValue:
    """The override that gives a series one colour, whatever its place and value."""
    return dashboard_models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})


def steps(*values: tuple[float | None, str]) -> builders.ThresholdsConfig:
    """Colours from a value on; the first has None."""
    thresholds = [dashboard_models.Threshold(value=value, color=color) for value, color in values]
    return (
        builders.ThresholdsConfig().mode(dashboard_models.ThresholdsMode.ABSOLUTE).steps(thresholds)
    )


def legend(*, shown: bool = True) -> common.VizLegendOptions:
    """The names of the series in lines below the panel, or none."""
    below = common.VizLegendOptions().placement(models.LegendPlacement.BOTTOM)
    return below.display_mode(models.LegendDisplayMode.LIST).show_legend(shown)
