"""Coloured cells over time: heat maps, one row per rank, one row per thing that is on or off."""

from __future__ import annotations

from collections.abc import Mapping

from dashboards.panels.style import Query, Text, framed, legend, target
from grafana_foundation_sdk.builders import common, heatmap, statetimeline, statushistory
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

# Cells across: more are narrower than a finger, and Grafana refuses more points than pixels.
MOMENTS = 120


def grid(
    text: Text, query: Query, unit: str, *, highest: float | None = None
) -> statushistory.Panel:
    """One row per series, one cell per moment, the darker the higher; `highest` is the value of the darkest cell."""
    shades = builders.FieldColor().mode(dashboard_models.FieldColorModeId.CONTINUOUS_BLUES)
    panel = framed(statushistory.Panel(), text, unit, span=12, height=9).min(0).color_scheme(shades)
    panel.show_value(models.VisibilityMode.NEVER).row_height(0.95).fill_opacity(90).line_width(0)
    panel.legend(legend(shown=False)).tooltip(
        common.VizTooltipOptions().mode(models.TooltipDisplayMode.SINGLE)
    )
    panel.max_data_points(MOMENTS).with_target(target(query, 0))
    return panel if highest is None else panel.max(highest)


def state_timeline(
    text: Text, query: Query, names: Mapping[int, tuple[str, str]]
) -> statetimeline.Panel:
    """One row per series, coloured by its value; `names` gives each value its word and colour."""
    options = {
        str(value): dashboard_models.ValueMappingResult(text=word, color=color, index=index)
        for index, (value, (word, color)) in enumerate(names.items())
    }
    panel = (
        framed(statetimeline.Panel(), text, units.NoUnit, span=24, height=8)
        .fill_opacity(80)
        .line_width(0)
    )
    panel.show_value(models.VisibilityMode.NEVER).row_height(0.85).merge_values(True)
    panel.legend(legend()).tooltip(
        common.VizTooltipOptions().mode(models.TooltipDisplayMode.SINGLE)
    )
    panel.color_scheme(
        builders.FieldColor().mode(dashboard_models.FieldColorModeId.FIXED).fixed_color("text")
    )
    return panel.mappings([dashboard_models.ValueMap(options=options)]).with_target(
        target(query, 0)
    )


def bucket_heatmap(text: Text, query: Query, unit: str) -> heatmap.Panel:
    """Cells coloured by the count of a histogram's bucket; `unit` is that of the bucket bounds."""
    colors = (
        heatmap.HeatmapColorOptions()
        .mode(heatmap_models.HeatmapColorMode.SCHEME)
        .scheme("Blues")
        .scale(heatmap_models.HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
    )
    panel = (
        framed(heatmap.Panel(), text, units.Short, span=12, height=8).calculate(False).color(colors)
    )
    panel.y_axis(heatmap.YAxisConfig().unit(unit)).filter_values(heatmap.FilterValueRange().le(0.5))
    return panel.with_target(target(Query(query.expr, "{{le}}"), 0).format(PromQueryFormat.HEATMAP))
