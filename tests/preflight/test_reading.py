"""From the files of the script's processes to the outcome."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchmem.preflight.result import Ended, read_result


def report(folder: Path, pid: int, **changed: Any) -> None:
    fields: dict[str, Any] = {
        "stopped": False,
        "steps": 0,
        "out_of_memory": False,
        "message": None,
        "host_bytes": 1,
        "values_read": 0,
        "devices": [],
    }
    (folder / f"{pid}.report.json").write_text(json.dumps(fields | changed))


@pytest.mark.parametrize(
    ("changed", "exit_code", "ended"),
    [
        ({"stopped": True}, 0, "steps"),
        ({}, 0, "finished"),
        ({"out_of_memory": True}, 1, "oom"),
        ({"out_of_memory": True}, 0, "finished"),
        ({}, 3, "error"),
    ],
)
def test_how_it_ended(
    changed: dict[str, Any], exit_code: int, ended: Ended, tmp_path: Path
) -> None:
    """Steps done, an end of its own, an OOM that killed it (a survived one is none), an error of its own."""
    report(tmp_path, 7, steps=2, **changed)
    assert read_result(tmp_path, exit_code, 1.0).ended == ended


def test_a_lacking_call_explains_the_error(tmp_path: Path) -> None:
    """An error of a library that follows a call which the phantom GPU lacks is put down to that, each name once."""
    report(tmp_path, 7, message="cuFFT error: CUFFT_NOT_SUPPORTED")
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "lacking").write_text("cuFirst\ncuSecond\ncuFirst\n")
    outcome = read_result(tmp_path, 1, 1.0)
    assert (outcome.ended, outcome.lacking) == ("unsupported", ("cuFirst", "cuSecond"))
    assert read_result(tmp_path, 0, 1.0).ended == "finished"


def test_a_script_s_own_error_is_its_own(tmp_path: Path) -> None:
    """An error that has nothing to do with a lacking call, which the script survived, stays the script's."""
    report(tmp_path, 7, message="list index out of range")
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "lacking").write_text("cuFirst\n")
    outcome = read_result(tmp_path, 1, 1.0)
    assert (outcome.ended, outcome.lacking) == ("error", ("cuFirst",))


def test_the_training_process_is_the_one_that_stepped(tmp_path: Path) -> None:
    """Of several processes that used the card the one with the most steps counts, with its own files."""
    report(tmp_path, 7, steps=0)
    report(tmp_path, 8, steps=5)
    for pid in (7, 8):
        (tmp_path / f"{pid}.snapshot.pickle").touch()
    outcome = read_result(tmp_path, 0, 1.0)
    assert (outcome.steps, outcome.snapshot) == (5, tmp_path / "8.snapshot.pickle")


def test_a_script_that_never_used_the_card(tmp_path: Path) -> None:
    """Without any report there are no devices, and the exit code decides."""
    assert read_result(tmp_path, 0, 1.0).devices == ()
    assert read_result(tmp_path, 2, 1.0).ended == "error"


def test_a_killed_script_got_this_far(tmp_path: Path) -> None:
    """Of a script that left no report, as after SIGKILL, the steps are known that it had told."""
    (tmp_path / "progress").write_text("1 0 0\n2 0 0\n3 0")
    outcome = read_result(tmp_path, -9, 1.0)
    assert (outcome.ended, outcome.steps) == ("error", 2)
