"""The shipped boards, drawn from recordings: what a user sees of them is as it should be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest
from pictures.drawing import RECORDING_OF, Drawing, Json, draw, missing
from pictures.findings import Finding, disagreements, findings, unmatched_overrides

# Each board from its usual recording, and those that a board must also be good for.
DRAWN = [
    ("node", "restarts"),
    ("node", "no-gpu"),
    ("fleet", "fleet"),
    ("self", "restarts"),
    ("self", "no-gpu"),
]
NOTHING_TO_SHOW = {"one-rank", "no-gpu"}
"""Recordings in which little happens, so that panels may be without data."""
ALL_ON_ONE = "restarts"
"""Boards drawn from one recording, with all variables at All, must give the same answers."""

# Findings that are as they should be, with the reason.
ACCEPTED: Mapping[tuple[str, str, str], str] = {
    ("fleet", "Cost of the waste", "no data"): "no price is set",
    ("self", "Collectors that failed", "no data"): "no collector fails",
    ("self", "Files rejected per minute", "no data"): "no file is rejected",
    ("self", "SDK errors by stage", "no data"): "the SDK has no error",
    ("node", "Video and image engines", "no data"): "training uses none",
    ("node", "PCIe replays per minute", "no data"): "no bus has errors",
    ("node", "Fans", "no data"): "these GPUs are cooled by the server's fans",
}


@pytest.fixture(scope="module")
def reports() -> dict[Drawing, Json]:
    """The report of every drawing, with all rows open."""
    if reason := missing():
        pytest.skip(reason)
    return draw(
        [
            Drawing(board, recording, open_rows=True, range="30m" if "64" in recording else None)
            for board, recording in DRAWN
        ]
    )


@pytest.mark.stack
@pytest.mark.parametrize(("board", "recording"), DRAWN)
def test_a_board_shows_no_fault(
    reports: Mapping[Drawing, Json], board: str, recording: str
) -> None:
    """Nothing on a board is broken, cut off, hidden, repeated, or empty without a reason."""
    drawn = {(drawing.board, drawing.recording): report for drawing, report in reports.items()}
    found = [
        finding
        for finding in findings(drawn[board, recording])
        if (board, finding.panel, finding.kind) not in ACCEPTED
        and not (finding.kind == "no data" and recording in NOTHING_TO_SHOW)
    ]

    assert [] == found


@pytest.mark.stack
def test_every_override_matches_a_field(reports: Mapping[Drawing, Json]) -> None:
    """Every override by name matches a field in at least one of the recordings."""
    by_board: dict[str, list[Json]] = defaultdict(list)
    for drawing, report in reports.items():
        by_board[drawing.board].append(report)
    found: dict[str, list[Finding]] = {
        board: unmatched_overrides(drawn) for board, drawn in by_board.items()
    }

    assert {} == {board: faults for board, faults in found.items() if faults}


@pytest.mark.stack
def test_a_question_has_one_answer() -> None:
    """Stats with the same title show the same numbers on every board."""
    if reason := missing():
        pytest.skip(reason)
    drawings = [Drawing(board, ALL_ON_ONE, open_rows=True, range="1h") for board in RECORDING_OF]
    reports = draw(drawings)

    assert [] == disagreements({drawing.board: report for drawing, report in reports.items()})
