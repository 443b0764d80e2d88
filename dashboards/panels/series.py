"""Values over time: lines, stacked areas, bars."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.colors import ATTENTION, NEUTRAL
from dashboards.panels.style import Query, Text, fixed_color, framed, legend, steps, target
from grafana_foundation_sdk.builders import common, timeseries
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as dashboard_models


def lines(
    text: Text, queries: Sequence[Query], unit: str, *, mark: float | None = None
) -> timeseries.Panel:
    """Lines over time; `mark` draws a dashed line at a value that matters."""
    panel = (
        framed(timeseries.Panel(), text, unit, span=12, height=8)
        .min(0)
        .line_width(1)
        .fill_opacity(0)
    )
    panel.show_points(models.VisibilityMode.NEVER).legend(legend())
    panel.tooltip(
        common.VizTooltipOptions()
        .mode(models.TooltipDisplayMode.MULTI)
        .sort(models.SortOrder.DESCENDING)
    )
    for index, query in enumerate(queries):
        panel.with_target(target(query, index))
        if query.color:
            panel.override_by_name(query.legend, [fixed_color(query.color)])
    return _marked(panel, mark) if mark is not None else panel


def _marked(panel: timeseries.Panel, value: float) -> timeseries.Panel:
    dashed = common.GraphThresholdsStyleConfig().mode(models.GraphThresholdsStyleMode.DASHED)
    return panel.thresholds(steps((None, "transparent"), (value, ATTENTION))).thresholds_style(
        dashed
    )


def bars(text: Text, queries: Sequence[Query], unit: str) -> timeseries.Panel:
    """Bars over time that stand on each other: for events and other things that add up."""
    panel = (
        lines(text, queries, unit)
        .draw_style(models.GraphDrawStyle.BARS)
        .fill_opacity(70)
        .line_width(0)
    )
    return panel.stacking(_stacked())


def stack(
    text: Text, queries: Sequence[Query], unit: str, total: Query, repeat: str | None = None
) -> timeseries.Panel:
    """Areas that add up to the dashed line `total`; one panel for each value of the variable `repeat`."""
    panel = lines(text, [*queries, total], unit).span(24).height(10).fill_opacity(70).line_width(0)
    panel.stacking(_stacked()).tooltip(
        common.VizTooltipOptions().mode(models.TooltipDisplayMode.MULTI)
    )
    panel.override_by_name(
        total.legend,
        [
            fixed_color(total.color or NEUTRAL),
            dashboard_models.DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
            dashboard_models.DynamicConfigValue("custom.fillOpacity", 0),
            dashboard_models.DynamicConfigValue("custom.lineWidth", 2),
            dashboard_models.DynamicConfigValue(
                "custom.lineStyle", {"fill": "dash", "dash": [10, 10]}
            ),
        ],
    )
    return panel.repeat(repeat).repeat_direction("h").max_per_row(2) if repeat else panel


def _stacked() -> common.StackingConfig:
    return common.StackingConfig().mode(models.StackingMode.NORMAL).group("A")
