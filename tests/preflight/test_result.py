"""The result of a run, from the files of its processes; growth of memory from step to step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.sizes import GIB, MIB
from torchmem.preflight.growth import kept_per_step
from torchmem.preflight.result import Ended, StepMemory, read_result
from torchmem.sample.errors import UsageError

STEPS = 20


def write_report(folder: Path, pid: int, **changed: Any) -> None:
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
        ({"out_of_memory": True, "message": "CUDA out of memory"}, 0, "oom"),
        ({}, 3, "error"),
    ],
)
def test_how_a_run_ended(
    changed: dict[str, Any], exit_code: int, ended: Ended, tmp_path: Path
) -> None:
    """Stopped, finished, ended by an OOM (not by one that it survived), or by another error.

    The shell that started a script can hide its exit code.
    """
    write_report(tmp_path, 7, steps=2, **changed)
    assert read_result(tmp_path, exit_code, 1.0).ended == ended


def test_a_lacking_call_explains_the_error(tmp_path: Path) -> None:
    """A "not supported" error after a lacking call makes the run unsupported."""
    write_report(tmp_path, 7, message="cuFFT error: CUFFT_NOT_SUPPORTED")
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "lacking").write_text("cuFirst\ncuSecond\ncuFirst\n")
    result = read_result(tmp_path, 1, 1.0)
    assert (result.ended, result.lacking) == ("unsupported", ("cuFirst", "cuSecond"))
    assert read_result(tmp_path, 0, 1.0).ended == "finished"


def test_an_unrelated_error_remains_an_error(tmp_path: Path) -> None:
    """An error that has nothing to do with a lacking call is the script's own."""
    write_report(tmp_path, 7, message="list index out of range")
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "lacking").write_text("cuFirst\n")
    result = read_result(tmp_path, 1, 1.0)
    assert (result.ended, result.lacking) == ("error", ("cuFirst",))


def test_the_training_process_has_the_most_steps(tmp_path: Path) -> None:
    """Of several processes that used the GPU, the one with the most steps gives the result."""
    write_report(tmp_path, 7, steps=0)
    write_report(tmp_path, 8, steps=5)
    for pid in (7, 8):
        (tmp_path / f"{pid}.snapshot.pickle").touch()
    result = read_result(tmp_path, 0, 1.0)
    assert (result.steps, result.snapshot) == (5, tmp_path / "8.snapshot.pickle")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"steps": 1}',
        b"[" * 100_000,
        b'{"devices": [{"phase_peaks": [[1]]}]}',
    ],
)
def test_a_damaged_report_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    """A report that was cut off or changed says what to do."""
    (tmp_path / "7.report.json").write_bytes(content)
    with pytest.raises(UsageError, match="run the preflight again"):
        read_result(tmp_path, 0, 1.0)


def test_a_script_that_never_used_the_gpu(tmp_path: Path) -> None:
    """Without a report there are no devices, and the exit code decides."""
    assert read_result(tmp_path, 0, 1.0).devices == ()
    assert read_result(tmp_path, 2, 1.0).ended == "error"


def test_a_killed_script_has_the_steps_of_its_last_progress(tmp_path: Path) -> None:
    """A script without a report, as after SIGKILL, has made the steps of its progress file."""
    (tmp_path / "progress").write_text("1 0 0\n2 0 0\n3 0")
    result = read_result(tmp_path, -9, 1.0)
    assert (result.ended, result.steps) == ("error", 2)


def steps(allocated: list[int]) -> list[StepMemory]:
    return [StepMemory(number, size, size, size) for number, size in enumerate(allocated, 1)]


@given(st.integers(1, GIB), st.integers(8, 60))
def test_growth_of_a_steady_leak_is_exact(leak: int, number: int) -> None:
    """A leak of a constant number of bytes per step is reported to the byte."""
    assert leak == kept_per_step(steps([GIB + step * leak for step in range(number)]))


@given(st.lists(st.integers(0, GIB), min_size=1, max_size=6))
def test_growth_of_a_short_run_is_unknown(allocated: list[int]) -> None:
    """With too few steps the growth is None, not 0."""
    assert kept_per_step(steps(allocated)) is None


@given(st.integers(0, STEPS - 1), st.integers(1, GIB))
def test_a_single_allocation_is_not_growth(when: int, size: int) -> None:
    """The optimizer's state, for example, is allocated once, in any step."""
    assert kept_per_step(steps([GIB + size * (step >= when) for step in range(STEPS)])) == 0


@given(
    st.lists(st.sampled_from([0, MIB]), min_size=12, max_size=60).filter(
        lambda sizes: len(sizes) % 2 == 0
    )
)
def test_memory_that_is_freed_again_is_not_growth(half: list[int]) -> None:
    """Batches of different lengths leave different amounts of memory allocated."""
    assert kept_per_step(steps([0, *half, *reversed(half)])) == 0


def test_shrinking_memory_is_not_growth() -> None:
    """Growth is never negative."""
    assert kept_per_step(steps([GIB - step * MIB for step in range(STEPS)])) == 0
