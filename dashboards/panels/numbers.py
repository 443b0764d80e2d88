"""Single numbers."""

from __future__ import annotations

from collections.abc import Mapping

from dashboards.colors import ATTENTION, NEUTRAL
from dashboards.panels.style import Query, Text, fixed_color, framed, steps, target
from grafana_foundation_sdk.builders import common, stat
from grafana_foundation_sdk.models import common as models


def stat_panel(
    text: Text,
    query: Query,
    unit: str,
    *,
    warn_above: float | None = None,
    colors: Mapping[str, str] | None = None,
) -> stat.Panel:
    """One number per series. It is neutral unless `warn_above` or the colour of a series says otherwise."""
    warned = [] if warn_above is None else [(warn_above, ATTENTION)]
    mode = models.BigValueTextMode.VALUE_AND_NAME if query.legend else models.BigValueTextMode.AUTO
    panel = (
        framed(stat.Panel(), text, unit, span=4, height=4)
        .graph_mode(models.BigValueGraphMode.NONE)
        .color_mode(models.BigValueColorMode.VALUE)
        .text_mode(mode)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(steps((None, NEUTRAL), *warned))
        .with_target(target(query, 0).instant())
    )
    for name, color in (colors or {}).items():
        panel.override_by_name(name, [fixed_color(color)])
    return panel
