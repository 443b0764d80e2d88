"""Write the dashboards' JSON: `python dashboards/build.py`; with --check only say which file is out of date."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "dashboards" / "json"


def main(argv: list[str] | None = None) -> int:
    """Return 0, or with --check 1 where a committed file differs from what would be written."""
    parser = argparse.ArgumentParser(description="Write the dashboards' JSON.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a file is out of date"
    )
    check = parser.parse_args(argv).check
    stale = {
        path: text
        for path, text in _rendered().items()
        if not path.exists() or path.read_text() != text
    }
    for path, text in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run make dashboards.", file=sys.stderr)
        else:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


def _rendered() -> dict[Path, str]:
    # Schema v2 is what the generator prefers and what Grafana 12 calls not for production.
    warnings.filterwarnings("ignore", "Prefer dashboardv2", DeprecationWarning)
    sys.path.insert(0, str(ROOT))
    from dashboards.boards import BOARDS
    from dashboards.panels import dashboard

    siblings = {board.uid: board.title for board in BOARDS.values()}
    boards = {name: dashboard(board, siblings) for name, board in BOARDS.items()}
    return {
        OUT / f"{name}.json": json.dumps(board, indent=2) + "\n" for name, board in boards.items()
    }


if __name__ == "__main__":
    sys.exit(main())
