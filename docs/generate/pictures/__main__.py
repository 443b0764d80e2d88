"""Draw the dashboards from recordings, and say what is wrong with them: `make boards`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from docs.generate.pictures import matrix
from docs.generate.pictures.drawing import BOARDS, RECORDING_OF, Drawing, Json, draw, missing
from docs.generate.pictures.findings import Finding, findings, unmatched_overrides
from docs.generate.pictures.recorder import BUILD, recorded, served
from docs.generate.pictures.recordings import END, RECORDINGS

ENDS = datetime.fromtimestamp(END, timezone.utc).isoformat()


def main() -> int:
    """Draw what the command line asks for and return the exit code."""
    arguments = _arguments()
    if reason := missing():
        print(f"Nothing can be drawn: {reason}.", file=sys.stderr)
        return 2
    if arguments.serve:
        return _serve(arguments.serve)
    if arguments.matrix:
        found = matrix.lines(draw(_matrix(arguments), arguments.out))
    else:
        found = _lines(draw(_drawings(arguments), arguments.out))
    for line in found:
        print(line)
    print(f"Pictures and reports are in {arguments.out}.")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make boards ARGS=...", description=__doc__)
    names = sorted(path.stem for path in BOARDS.glob("*.json"))
    parser.add_argument("boards", nargs="*", metavar="BOARD", help=f"of {', '.join(names)}")
    add = parser.add_argument
    add("--recording", choices=RECORDINGS, help="instead of the board's usual one")
    add("--theme", choices=("dark", "light", "both"), default="both")
    add("--width", type=int, help="of the window, in pixels (default 1600)")
    add("--matrix", action="store_true", help="every case, width and theme: tens of minutes")
    add("--range", help="such as 30m, instead of the board's own")
    add("--var", action="append", default=[], metavar="NAME=VALUE", help="value of a variable")
    add("--out", type=Path, default=BUILD, help=f"folder (default {BUILD})")
    add("--serve", choices=RECORDINGS, metavar="RECORDING", help="only run its Prometheus")
    arguments = parser.parse_args()
    unknown = set(arguments.boards) - set(names)
    if unknown:
        parser.error(f"there is no board {min(unknown)}: choose from {', '.join(names)}")
    arguments.boards = arguments.boards or names
    return arguments


def _drawings(arguments: argparse.Namespace) -> Iterator[Drawing]:
    """Yield the drawings: each board as it loads, in each theme, and once with its rows open."""
    themes = ("dark", "light") if arguments.theme == "both" else (arguments.theme,)
    variables = tuple(tuple(pair.split("=", 1)) for pair in arguments.var)
    for board in arguments.boards:
        drawing = Drawing(
            board,
            arguments.recording or RECORDING_OF[board],
            width=arguments.width or 1600,
            variables=variables,
            range=arguments.range,
        )
        yield replace(drawing, theme=themes[0], open_rows=True)
        yield from (replace(drawing, theme=theme) for theme in themes)


def _matrix(arguments: argparse.Namespace) -> Iterator[Drawing]:
    """Return every combination, or those that the flags leave."""
    recordings = [arguments.recording] if arguments.recording else list(matrix.CASES)
    widths = [arguments.width] if arguments.width else matrix.WIDTHS
    themes = matrix.THEMES if arguments.theme == "both" else [arguments.theme]
    return matrix.drawings(arguments.boards, recordings, widths, themes)


def _lines(reports: Mapping[Drawing, Json]) -> Iterator[str]:
    """Yield what was found on each board with its rows open, and the counts."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    by_board: dict[str, list[Json]] = defaultdict(list)
    for drawing, report in reports.items():
        by_board[drawing.board].append(report)
    for board, drawn in by_board.items():
        found = [*findings(drawn[0]), *unmatched_overrides(drawn)]
        for finding in found:
            yield f"{board}: {finding.panel or 'board'}: {finding.kind}: {finding.what}"
        counts[board].update(_panels_by_kind(found))
    yield from _table(counts)


def _panels_by_kind(found: Iterable[Finding]) -> Counter[str]:
    return Counter(kind for kind, _ in {(finding.kind, finding.panel) for finding in found})


def _table(counts: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Yield a table: for each kind of fault, the panels of each board that have it."""
    kinds = sorted({kind for counter in counts.values() for kind in counter})
    if not kinds:
        yield "Nothing is wrong."
        return
    width = max(map(len, kinds))
    yield f"{'panels with':{width}}  {'  '.join(counts)}"
    for kind in kinds:
        cells = (f"{counter[kind] or '-':>{len(board)}}" for board, counter in counts.items())
        yield f"{kind:{width}}  {'  '.join(cells)}"


def _serve(recording: str) -> int:
    with served(recorded([recording])[recording]) as url:
        print(f"{url} holds {recording} until {ENDS}. Press Ctrl-C to stop.", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
