"""`torchmem why` beside a recording: the judgment of `torchmem why --leaks` on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.recordings import RecordedJob, write
from support.reports import LEAK, NOW

from torchmem.explain.lines import Lines
from torchmem.explain.oom_report import encode
from torchmem.node.reports import load
from torchmem.sample.capture_messages import OOM_RECORDING_SUFFIX, SNAPSHOT_SUFFIX
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.trace.recorded_leaks import MAX_WRITING_SECONDS, leak_lines, recorded_leaks
from torchmem.why.local import LocalNode

MIB = 1 << 20
PROCESS = "1-4242-77"
Beside = Callable[..., list[str]]


def job(*, with_stacks: bool = True, steps: int = 40) -> dict[str, Any]:
    """Return a recording of steps that each keep 32 MiB at line 66, and free the rest."""
    recorded = RecordedJob()
    for _ in range(steps):
        passing, kept = recorded.alloc(8 * MIB), recorded.alloc(32 * MIB)
        allocations = [entry for entry in recorded.trace if entry["action"] == "alloc"][-2:]
        for entry, line in zip(allocations, (88, 66), strict=True):
            frame = {"filename": "/home/ann/train.py", "line": line, "name": "log\x1b[1m"}
            entry["frames"] = [frame] if with_stacks else []
        assert passing is not None
        assert kept is not None
        recorded.free(passing)
    return recorded.snapshot()


@pytest.fixture
def beside(tmp_path: Path) -> Beside:
    """Return a function that writes a file beside the report, and returns the section."""
    device = replace(LEAK.device, total_bytes=4 << 30)
    report = replace(LEAK, device=device, lines=Lines((), 0, 32 * MIB))
    path = tmp_path / f"{PROCESS}-1{REPORT_SUFFIX}"
    path.write_bytes(encode(report))

    def shown(content: Any, suffix: str = OOM_RECORDING_SUFFIX, written: float = NOW) -> list[str]:
        file = tmp_path / f"{PROCESS}{suffix}"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            write(content, file)
        os.utime(file, (written, written))
        return list(leak_lines(recorded_leaks(path, load(path))))

    return shown


def test_the_line_that_leaks(beside: Beside) -> None:
    """It stands with what it kept, without control characters; lines that freed all do not."""
    _, *rows = beside(job())

    assert rows == [
        "      1.25 GiB  /home/ann/train.py:66  log\N{REPLACEMENT CHARACTER}[1m  (40 blocks)"
    ]


def test_the_headline_names_it(beside: Beside, tmp_path: Path) -> None:
    """The first sentence and the JSON document have the line that only the recording tells."""
    beside(job())
    path = tmp_path / f"{PROCESS}-1{REPORT_SUFFIX}"
    found = LocalNode(tmp_path).explain(str(path))

    assert found.row.headline == found.oom.summary
    assert found.row.headline.endswith(
        "allocated at train.py:66 in log\N{REPLACEMENT CHARACTER}[1m"
    )
    assert [(leak["line"], leak["blocks"], leak["bytes"]) for leak in found.leaks] == [
        (66, 40, 1280 * MIB)
    ]


def test_a_capture_from_before_the_oom(beside: Beside) -> None:
    """A capture of the same process serves too, however old."""
    assert beside(job(), SNAPSHOT_SUFFIX, NOW - 1000)


@pytest.mark.parametrize(
    ("content", "written"),
    [
        (job(with_stacks=False), NOW),
        (job(steps=5), NOW),
        (job(), NOW - 100),
        (job(), NOW + 2 * MAX_WRITING_SECONDS),
        (b"junk", NOW),
    ],
    ids=["no stacks", "short", "of an earlier OOM", "of a later OOM", "damaged"],
)
def test_a_recording_that_says_nothing(beside: Beside, content: Any, written: float) -> None:
    """Without a usable recording of this OOM there is no section, and no error."""
    assert beside(content, written=written) == []


def test_without_a_recording(tmp_path: Path) -> None:
    """A report alone, in a file of any name, has no section."""
    path = tmp_path / "report"
    path.write_bytes(encode(LEAK))

    assert recorded_leaks(path, load(path)) == ()
