"""The house style of all panels and dashboards; the only folder that knows grafana_foundation_sdk."""

from dashboards.panels.board import Board, Choice, Note, dashboard
from dashboards.panels.cells import bucket_heatmap, grid, state_timeline
from dashboards.panels.numbers import stat_panel
from dashboards.panels.series import bars, lines, stack
from dashboards.panels.style import Json, Panel, Query, Text
from dashboards.panels.tables import Column, joined_table

__all__ = [
    "Board",
    "Choice",
    "Column",
    "Json",
    "Note",
    "Panel",
    "Query",
    "Text",
    "bars",
    "bucket_heatmap",
    "dashboard",
    "grid",
    "joined_table",
    "lines",
    "stack",
    "stat_panel",
    "state_timeline",
]
