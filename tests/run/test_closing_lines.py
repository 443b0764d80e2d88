"""The two lines with which a program ends that `torchmem run` started on a terminal: their words.

tests/allocator_tier/test_closing_lines.py has the programs.
"""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from support import reports
from support.samples import samples

from torchmem.explain.headline import headline
from torchmem.run.closing_lines import is_watched, lines, speaks
from torchmem.sample.run_directory import run_directory
from torchmem.sample.run_history import Growth, RunHistory
from torchmem.sample.sample import ByPool, Sample

GIB = reports.GIB
DEFAULT = run_directory({})
ALLOCATOR = reports.CAPACITY.device.allocator
assert ALLOCATOR
DEVICE = replace(
    reports.CAPACITY.device,
    counters=replace(reports.CAPACITY.device.counters, ooms={}),
    last_oom=None,
    driver_free_bytes=17 * GIB,
    allocator=replace(ALLOCATOR, reserved_bytes=ByPool(0, 60 * GIB), active_peak_bytes=51 * GIB),
)
RANK = reports.CAPACITY.process
HEALTHY = Sample(
    timestamp=reports.NOW,
    process=replace(RANK, rank=0, local_rank=0),
    devices=(DEVICE,),
    ended="exited",
)


def test_a_healthy_program() -> None:
    """The peak of its tensors, the share of the GPU, what it left, and where the rest is."""
    assert lines(HEALTHY, None, DEFAULT) == (
        "torchmem: peak 51.0 of 80.0 GiB (64%), 26.0 GiB left",
        "torchmem: `torchmem why --pid 4242` shows the rest",
    )


def test_an_oom_is_the_verdict() -> None:
    """Of a program that died of an OOM, the lines say why, and name the command that explains."""
    report = reports.LIMIT
    died = replace(HEALTHY, devices=(report.device,), ended="oom")
    first, second = lines(died, report, DEFAULT)

    assert "(48%)" in first
    assert first.endswith(f"; {headline(report)[0].lower()}{headline(report)[1:]}")
    assert second == "torchmem: `torchmem why` explains it"


def test_what_the_traceback_has_said_is_left_out() -> None:
    """Below a traceback that says why and where to read on, the peak is all that is new."""
    died = replace(HEALTHY, process=RANK, ended="oom")

    assert lines(died, reports.LIMIT, DEFAULT, is_explained=True) == (
        "torchmem: rank 3, peak 38.0 of 80.0 GiB (48%)",
    )


def test_growth_is_the_verdict() -> None:
    """The first line says what still grew when the program ended."""
    growth = Growth("kept", 8 << 20, 1, 40 * GIB, "held", is_leak=True)
    first, _ = lines(replace(HEALTHY, devices=(replace(DEVICE, growth=growth),)), None, DEFAULT)

    assert "; memory leak: tensors kept between steps grow by 8.00 MiB a step" in first


@pytest.mark.parametrize(("steps", "known"), [(1, False), (15, False), (60, True)])
def test_no_growth_is_said_where_it_would_have_shown(steps: int, known: bool) -> None:
    """After a few steps nothing is known of growth, and nothing is said."""
    each = tuple(range(1, steps + 1))
    history = RunHistory(each, tuple(map(float, each)), (GIB,) * steps, (GIB,) * steps)
    first, _ = lines(
        replace(HEALTHY, devices=(replace(DEVICE, run_history=history),)), None, DEFAULT
    )
    assert known == first.endswith("; no growth")


def test_the_gpu_with_the_highest_share_is_named() -> None:
    """With several GPUs, the first line is of the fullest."""
    small = replace(DEVICE, index=1, total_bytes=78 * GIB)
    first, _ = lines(replace(HEALTHY, devices=(DEVICE, small)), None, DEFAULT)

    assert first.startswith("torchmem: peak 51.0 of 78.0 GiB (65%) on cuda:1, ")


def test_another_run_directory_is_part_of_the_command(tmp_path: Path) -> None:
    """The command works as it is printed, in a shell that does not know the directory."""
    _, second = lines(HEALTHY, None, tmp_path)

    assert f"torchmem why --pid 4242 --run-dir {tmp_path}`" in second


@given(samples)
def test_every_sample_has_two_lines_or_none(sample: Sample) -> None:
    """Whatever a sample lacks, there are two short lines, or none if no peak is known."""
    found = lines(sample, None, DEFAULT)

    assert len(found) in {0, 2}
    assert all("None" not in line and "\n" not in line for line in found)


@pytest.mark.parametrize(
    ("rank", "local_rank", "world_size", "expected"),
    [
        (0, None, None, True),
        (0, 0, 8, True),
        (3, 3, 8, False),
        (8, 0, 16, True),
        (5, None, 8, False),
        (5, None, 1, True),
    ],
)
def test_one_rank_of_a_node_writes(
    rank: int, local_rank: int | None, world_size: int | None, expected: bool
) -> None:
    """Of many ranks on a node, local rank 0 writes the lines."""
    process = replace(RANK, rank=rank, local_rank=local_rank, world_size=world_size)
    assert speaks(process) == expected


@contextmanager
def terminal() -> Iterator[TextIO]:
    """Provide a terminal that is not that of this session."""
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "w") as stream:
            yield stream
    finally:
        os.close(ours)


def test_only_a_terminal_is_watched(tmp_path: Path) -> None:
    """Neither a file nor a pipe nor a missing stream is one."""
    with terminal() as screen, (tmp_path / "log").open("w") as log:
        assert is_watched(screen)
        assert not is_watched(log)
    assert not is_watched(io.StringIO())
    assert not is_watched(None)
