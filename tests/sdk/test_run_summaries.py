"""A session leaves a summary of its run at the end."""

from __future__ import annotations

import os
from pathlib import Path

from torchmem.explain.run_summary import SUMMARY_SUFFIX, decode
from torchmem.sdk.run_summaries import MAX_SUMMARIES_PER_USER
from torchmem.sdk.session import Session
from torchmem.sdk.settings import Settings
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend

MIB = 1 << 20


def train(allocator: DeviceCachingAllocator, run_dir: Path) -> Session:
    """Train three steps with a peak of 64 MiB, and end."""
    settings = Settings(run="night", run_dir=run_dir, interval=3600.0)
    session = Session(settings, SimulatedBackend([allocator]), {})
    for _ in range(3):
        allocator.free(allocator.malloc(64 * MIB))
        session.step()
    session.close()
    return session


def summaries(run_dir: Path) -> list[Path]:
    return sorted(run_dir.glob(f"{os.geteuid()}/*{SUMMARY_SUFFIX}"))


def test_the_summary_of_a_run(allocator: DeviceCachingAllocator, tmp_path: Path) -> None:
    """It has the peak, the steps, and how the run ended."""
    train(allocator, tmp_path)
    (path,) = summaries(tmp_path)
    found = decode(path.read_bytes())

    assert (found.process.run, found.state, found.steps) == ("night", "exited", 3)
    assert found.devices[0].allocated_peak_bytes == 64 * MIB
    assert found.verdict == "It ended by itself after 3 steps."


def test_the_newest_summaries_are_kept(allocator: DeviceCachingAllocator, tmp_path: Path) -> None:
    """Their number is bounded, the oldest go first, and other files stay."""
    folder = tmp_path / str(os.geteuid())
    folder.mkdir(0o700)
    for number in range(MAX_SUMMARIES_PER_USER):
        path = folder / f"1-{number}-1{SUMMARY_SUFFIX}"
        path.write_text("{}")
        os.utime(path, (number, number))
    mine = folder / f"mine{SUMMARY_SUFFIX}"
    mine.write_text("of the user")
    os.utime(mine, (0, 0))
    train(allocator, tmp_path)

    assert len(summaries(tmp_path)) == MAX_SUMMARIES_PER_USER + 1
    assert mine.exists()
    assert not (folder / f"1-0-1{SUMMARY_SUFFIX}").exists()


def test_a_summary_that_cannot_be_written_costs_nothing_else(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    """An error counts, and the last sample is published."""
    train(allocator, tmp_path)
    (path,) = summaries(tmp_path)
    path.unlink()
    path.mkdir()
    session = train(allocator, tmp_path)

    assert path.is_dir()
    assert session.errors.counts["report"] == 1
    assert session.newest is not None
    assert session.newest.ended == "exited"
