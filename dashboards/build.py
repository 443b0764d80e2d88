"""dashboards/json, generated from dashboards/boards by `make generate`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

JSON = Path(__file__).resolve().parent / "json"


def rendered() -> dict[Path, str]:
    """Return the JSON of every dashboard."""
    # The generator prefers schema v2, which Grafana 12 does not recommend for production.
    warnings.filterwarnings("ignore", "Prefer dashboardv2", DeprecationWarning)
    from dashboards.boards import BOARDS
    from dashboards.panels import dashboard

    siblings = {board.uid: board.title for board in BOARDS.values()}
    boards = {name: dashboard(board, siblings) for name, board in BOARDS.items()}
    return {
        JSON / f"{name}.json": json.dumps(board, indent=2) + "\n" for name, board in boards.items()
    }
