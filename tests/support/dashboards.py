"""The queries of the shipped dashboards, as Grafana would send them with every variable on "All"."""

from __future__ import annotations

import json
import re
from pathlib import Path


def expressions(root: Path) -> list[str]:
    """Every query of every panel, its variables filled in."""
    boards = [json.loads(path.read_text()) for path in sorted((root / "dashboards" / "json").glob("*.json"))]
    targets = [target for board in boards for panel in board["panels"] for target in panel.get("targets", [])]
    return [re.sub(r"\$\w+", ".*", re.sub(r"\$__\w+", "1m", target["expr"])) for target in targets]
