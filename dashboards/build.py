"""dashboards/json, generated from dashboards/boards by `make generate`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from dashboards.board import dashboard
from dashboards.boards import fleet, itself, node, oom, training

JSON = Path(__file__).resolve().parent / "json"

# By the name of their file.
BOARDS = {
    "fleet": fleet.BOARD,
    "training-memory": training.BOARD,
    "node": node.BOARD,
    "oom": oom.BOARD,
    "self": itself.BOARD,
}


def rendered() -> dict[Path, str]:
    """Return the JSON of every dashboard."""
    # The generator prefers schema v2, which Grafana 12 does not recommend for production.
    warnings.filterwarnings("ignore", "Prefer dashboardv2", DeprecationWarning)
    siblings = {board.uid: board.title for board in BOARDS.values()}
    boards = {name: dashboard(board, siblings) for name, board in BOARDS.items()}
    return {
        JSON / f"{name}.json": json.dumps(board, indent=2) + "\n" for name, board in boards.items()
    }
