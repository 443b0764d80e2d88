"""The shipped boards, drawn from recordings: what a user sees of them is as it should be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import pytest
from docs.generate.pictures.drawing import RECORDING_OF, Drawing, Json, draw, missing
from docs.generate.pictures.findings import (
    NO_DATA,
    WITHOUT_PARTS,
    Finding,
    disagreements,
    findings,
    unmatched_overrides,
)

# Each board from its usual recording, and those that a board must also be good for; some in the
# smallest and the largest usual window.
DRAWN = [
    *RECORDING_OF.items(),
    ("node", "no-gpu"),
    ("self", "no-gpu"),
    ("training-memory", "one-rank"),
    ("training-memory", "ranks-64"),
    ("training-memory", "serving"),
]
WIDTHS = {
    ("fleet", "fleet"): 1280,
    ("node", "no-gpu"): 1280,
    ("self", "no-gpu"): 1920,
    ("training-memory", "one-rank"): 1920,
}
NOTHING_TO_SHOW = {"one-rank", "no-gpu", "ranks-64"}
"""Recordings in which little happens, so that panels may be without data."""
ENGINES = {
    "CUDA graphs and MemPools",
    "Given back while asleep",
    "What the engine holds",
    "KV cache in use",
    "Planned and actual",
    "Free beyond what wakes up",
    "Left after a sleep",
    "Sleeps and preemptions",
}
"""Panels that have data where an engine serves, and only there."""
ALL_ON_ONE = "restarts"
"""Boards drawn from one recording, with all variables at All, must give the same answers."""

# Panels without data, by board and title, with the reason.
ACCEPTED: Mapping[tuple[str, str], str] = {
    ("node", "Video and image engines"): "training uses none",
    ("node", "PCIe replays per minute"): "no bus has errors",
    ("node", "Held for nothing"): "all processes live, on their own GPUs",
    ("node", "Processes"): "the simulated processes are in no pod, and no unit of systemd",
    ("node", "Fans"): "these GPUs are cooled by the server's fans",
    ("self", "Collectors that failed"): "all of them work",
    ("self", "Files rejected per minute"): "all files are in order",
    ("self", "SDK errors by stage"): "there are none",
    ("training-memory", "Growth of the peak per hour"): "the newest processes are too young",
    ("training-memory", "Memory released"): "the ranks have no tier of the setting release",
    ("training-memory", "Out of memory in"): "the headroom of no rank falls at the end",
    ("training-memory", "OutOfMemoryErrors"): "the engine has none",
    ("training-memory", "Processes"): "the simulated ranks run under Slurm, not in pods",
    ("training-memory", "NCCL by process group"): "the simulated ranks have no NCCL",
}


@pytest.fixture(scope="module")
def reports() -> dict[Drawing, Json]:
    """The report of every drawing, with all rows open."""
    if reason := missing():
        pytest.skip(reason)
    return draw(
        [
            Drawing(
                board,
                recording,
                width=WIDTHS.get((board, recording), 1600),
                open_rows=True,
                range="15m" if "64" in recording else None,
            )
            for board, recording in DRAWN
        ]
    )


def _may_be_empty(board: str, panel: str, recording: str) -> bool:
    if panel in ENGINES:
        return recording != "serving"
    return recording in NOTHING_TO_SHOW or (board, panel) in ACCEPTED


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
        if not (
            finding.kind in {NO_DATA, WITHOUT_PARTS}
            and _may_be_empty(board, finding.panel, recording)
        )
    ]

    assert found == []


@pytest.mark.stack
def test_every_override_matches_a_field(reports: Mapping[Drawing, Json]) -> None:
    """Every override by name matches a field in at least one of the recordings."""
    by_board: dict[str, list[Json]] = defaultdict(list)
    for drawing, report in reports.items():
        by_board[drawing.board].append(report)
    found: dict[str, list[Finding]] = {
        board: unmatched_overrides(drawn) for board, drawn in by_board.items()
    }

    faults = [
        (board, finding.panel, finding.what)
        for board, of_board in found.items()
        for finding in of_board
        if (board, finding.panel) not in ACCEPTED
    ]
    assert faults == []


@pytest.mark.stack
def test_collectors_without_nvml_have_not_failed(reports: Mapping[Drawing, Json]) -> None:
    """On a node without NVML, the chart of failed collectors is as empty as their number is 0."""
    (drawn,) = (
        report
        for drawing, report in reports.items()
        if (drawing.board, drawing.recording) == ("self", "no-gpu")
    )

    assert ("Collectors that failed", NO_DATA) in {
        (finding.panel, finding.kind) for finding in findings(drawn)
    }


@pytest.mark.stack
def test_a_question_has_one_answer() -> None:
    """Stats with the same title show the same numbers on every board."""
    if reason := missing():
        pytest.skip(reason)
    drawings = [Drawing(board, ALL_ON_ONE, open_rows=True, range="1h") for board in RECORDING_OF]
    reports = draw(drawings)

    assert disagreements({drawing.board: report for drawing, report in reports.items()}) == []
