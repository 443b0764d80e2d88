"""Dashboards in the form that grafana.com takes: Grafana's "Export for sharing externally"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MIN_GRAFANA = "11.0.0"


def for_grafana_com(board: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dashboard with the list of what it requires.

    It has no inputs: the variable `datasource` asks for the data source after the import. Source of
    the form: `DashboardExporter` in public/app/features/dashboard/components/DashExportModal.
    """
    kinds = sorted({panel["type"] for panel in _panels(board) if panel["type"] != "row"})
    required = [
        {"type": "grafana", "id": "grafana", "name": "Grafana", "version": MIN_GRAFANA},
        {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
        *(
            {"type": "panel", "id": kind, "name": kind.replace("-", " ").title(), "version": ""}
            for kind in kinds
        ),
    ]
    return {"__inputs": [], "__elements": {}, "__requires": required, "id": None, **board}


def _panels(board: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield all panels, also those of folded rows."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())
