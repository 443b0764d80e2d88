"""Every case of every board, at every usual width and in both themes: `make boards ARGS=--matrix`.

It costs minutes, mostly those of 1,024 ranks, so no test draws it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from docs.generate.pictures.drawing import Drawing, Json
from docs.generate.pictures.findings import NO_DATA, WITHOUT_PARTS, Finding, findings

CASES = {
    "empty": "no data",
    "no-gpu": "no GPU",
    "one-rank": "1 rank",
    "restarts": "4 ranks with restarts, MIG",
    "serving": "an engine",
    "fleet": "6 nodes, 3 runs",
    "ranks-64": "64 ranks",
    "ranks-1024": "1,024 ranks",
}
"""What is drawn, by the recording that has it."""
WIDTHS = (1280, 1600, 1920)
THEMES = ("light", "dark")
MINUTES = {"ranks-64": "15m", "ranks-1024": "15m"}
"""The time range of recordings that are shorter than those of the boards."""
EXPECTED = {NO_DATA, WITHOUT_PARTS}
"""Kinds that do not count as faults here: in most cases, some panels have nothing to show."""


def drawings(
    boards: Iterable[str],
    recordings: Iterable[str] = tuple(CASES),
    widths: Sequence[int] = WIDTHS,
    themes: Sequence[str] = THEMES,
) -> Iterator[Drawing]:
    """Yield every combination, with all rows open."""
    boards = tuple(boards)
    for recording in recordings:
        for board in boards:
            for width in widths:
                for theme in themes:
                    yield Drawing(
                        board,
                        recording,
                        theme,
                        width,
                        open_rows=True,
                        range=MINUTES.get(recording),
                    )


def lines(reports: Mapping[Drawing, Json]) -> Iterator[str]:
    """Yield a table with the number of faults of each case on each board, and the faults."""
    found = {drawing: _faults(report) for drawing, report in reports.items()}
    boards = list(dict.fromkeys(drawing.board for drawing in found))
    recordings = list(dict.fromkeys(drawing.recording for drawing in found))
    width = max(map(len, CASES.values()))
    yield f"{'faults':{width}}  {'  '.join(boards)}"
    for recording in recordings:
        cells = (f"{_distinct(found, recording, board) or '-':>{len(board)}}" for board in boards)
        yield f"{CASES.get(recording, recording):{width}}  {'  '.join(cells)}"
    yield f"{len(found)} pictures"
    yield from _listed(found)


def _faults(report: Json) -> list[Finding]:
    return [finding for finding in findings(report) if finding.kind not in EXPECTED]


def _distinct(found: Mapping[Drawing, Sequence[Finding]], recording: str, board: str) -> int:
    """Return the number of faults of a case; one that several pictures have counts once."""
    return len(
        {
            (finding.panel, finding.kind)
            for drawing, faults in found.items()
            for finding in faults
            if (drawing.recording, drawing.board) == (recording, board)
        }
    )


def _listed(found: Mapping[Drawing, Sequence[Finding]]) -> Iterator[str]:
    """Yield each fault once, with the widths and themes in which it is seen."""
    where: dict[tuple[str, str, Finding], list[str]] = defaultdict(list)
    for drawing, faults in found.items():
        for finding in faults:
            seen = where[drawing.recording, drawing.board, finding]
            seen.append(f"{drawing.width} {drawing.theme}")
    for (recording, board, finding), views in where.items():
        panel = finding.panel or "board"
        yield f"{recording}: {board}: {panel}: {finding.kind}: {finding.what} ({', '.join(views)})"
