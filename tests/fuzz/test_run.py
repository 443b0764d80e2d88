"""The first inputs of each fuzz target, and the command that runs more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.fuzz import TARGETS, make_input

INPUTS = 200
SLOW = {"snapshot_file": 20, "run_directory": 40, "thresholds_file": 40, "map_requests": 40}
RUN = Path(__file__).with_name("run.py")


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, str(RUN), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_any_input_is_accepted_or_refused(target: str) -> None:
    """What others may have written is read, or refused in the documented way."""
    for number in range(SLOW.get(target, INPUTS)):
        TARGETS[target].check(make_input(1, target, number))


def test_the_command_counts_every_input() -> None:
    """The table adds up, and the exit code says that nothing failed."""
    done = fuzz("--inputs", "50", "--jobs", "1", "headers", "capture_message")
    cells = [row.strip("| ").split(" | ") for row in done.stdout.splitlines()[2:]]

    assert (done.returncode, done.stderr) == (0, "")
    assert {row[0] for row in cells} == {"headers", "capture_message", "all"}
    for _, tried, accepted, refused, failed, *_ in cells:
        assert int(tried) == int(accepted) + int(refused) + int(failed)
    assert [cells[-1][1], cells[-1][4]] == ["50", "0"]


def test_an_input_can_be_tried_again() -> None:
    """An input depends only on the seed, the target and its number."""
    first, second = (fuzz("--replay", "oom_report_file:7") for _ in range(2))

    assert first.stdout.startswith(repr(make_input(1, "oom_report_file", 7)))
    assert first.stdout == second.stdout
    assert first.stdout != fuzz("--seed", "2", "--replay", "oom_report_file:7").stdout
