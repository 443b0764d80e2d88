"""At an OOM the evidence is on disk before the exception, there is never much of it, and it harms nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.samples import full_sample

from torchmem.allocator.oom_report import OomReport, Trend, decode
from torchmem.sample.run_directory import MAX_REPORT_BYTES, REPORT_SUFFIX, SAMPLE_SUFFIX
from torchmem.sample.sample import OomRecord, Sample
from torchmem.sdk._oom import (
    MOST_PER_PROCESS,
    MOST_PER_USER,
    MOST_POINTS,
    NEW_FILE_SECONDS,
    SPAN_SECONDS,
    Evidence,
    History,
    Scene,
    keep_newest,
)
from torchmem.sdk._session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError

MIB = 1 << 20
Opener = Callable[..., Session]
SAMPLE = full_sample()


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _scene(requested: int = 1) -> Scene:
    return Scene(0, OomRecord(1_700_000_000.0, requested, "capacity"), 0, None, None, None)


def _reports(directory: Path) -> list[OomReport]:
    paths = sorted(
        directory.glob(f"*{REPORT_SUFFIX}"),
        key=lambda path: int(path.name.split("-")[-1].split(".")[0]),
    )
    return [decode(path.read_bytes()) for path in paths]


def test_the_report_is_there_before_the_exception(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """When the script catches the error its report is complete: cause, state after the flush and before it."""
    session = open_session(backend)
    blocks = [allocator.malloc(16 * MIB - (index % 2) * 12 * MIB) for index in range(100)]
    for block in blocks[::2]:
        allocator.free(block)
    whole = allocator.malloc(20 * MIB)
    allocator.free(whole)
    backend.step()
    session._monitor.recorder.take_snapshot()
    session._monitor.recorder.measure_snapshot()

    with pytest.raises(OutOfMemoryError):
        allocator.malloc(700 * MIB)

    (report,) = _reports(tmp_path)
    assert ("fragmentation", "stranded", 700 * MIB) == (
        report.oom.cause,
        report.oom.detail,
        report.oom.requested_bytes,
    )
    assert report.layout is not None
    assert report.layout_before is not None
    assert (0, 20 * MIB) == (report.layout.releasable_bytes, report.layout_before.releasable_bytes)
    assert report.layout.stranded_bytes == report.cached_free_bytes > 700 * MIB
    assert allocator.card.mem_get_info()[0] == report.driver_free_bytes
    assert (1, None) == (report.steps.count, report.limit_bytes)
    assert "native" == report.allocator_settings["backend"]


def test_a_block_on_another_stream_is_told(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """A request that would fit into another stream's free block says so."""
    open_session(backend)
    side = allocator.malloc(800 * MIB, stream=7)
    allocator.free(side)
    allocator.malloc(2 * MIB, stream=7)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(600 * MIB, stream=0)

    assert ["stream"] == [report.oom.detail for report in _reports(tmp_path)]


def test_the_layout_before_stays_that_from_before_the_flush(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """Two OOMs in a row both show the periodic snapshot, not what the first one left."""
    session = open_session(backend)
    allocator.free(allocator.malloc(500 * MIB))
    backend.step()
    session._monitor.recorder.take_snapshot()
    session._monitor.recorder.measure_snapshot()
    for _ in range(2):
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(2048 * MIB)

    first, second = _reports(tmp_path)
    assert first.layout_before == second.layout_before
    assert first.layout_before is not None
    assert 500 * MIB == first.layout_before.releasable_bytes


def test_a_search_for_the_batch_size_leaves_few_files(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """A hundred caught OOMs in a moment leave the first report and the newest one, and all are counted."""
    session = open_session(backend)
    for index in range(100):
        with pytest.raises(OutOfMemoryError):
            allocator.malloc((2048 + 2 * index) * MIB)

    assert [2048 * MIB, 2246 * MIB] == [report.oom.requested_bytes for report in _reports(tmp_path)]
    assert {"capacity": 100} == session._monitor.recorder.samples()[0].counters.ooms
    assert 0 == sum(session.errors.counts.values())


@given(st.lists(st.floats(0, 2 * NEW_FILE_SECONDS), min_size=1, max_size=40))
def test_the_newest_oom_is_always_on_disk(
    tmp_path_factory: pytest.TempPathFactory, pauses: list[float]
) -> None:
    """Whenever OOMs come, the last file holds the last one and a process never has more than its share."""
    folder, clock = tmp_path_factory.mktemp("run"), Clock()
    evidence = Evidence(folder / f"1-2-3{SAMPLE_SUFFIX}", clock)
    for number, pause in enumerate(pauses):
        clock.now += pause
        evidence.write(_scene(number), SAMPLE)

        assert number == _reports(folder)[-1].oom.requested_bytes
        assert len(_reports(folder)) <= MOST_PER_PROCESS


def test_a_user_keeps_a_bounded_number(tmp_path: Path) -> None:
    """Over all processes the oldest reports go first; other files stay."""
    (tmp_path / f"1-2-3{SAMPLE_SUFFIX}").touch()
    for number in range(MOST_PER_USER + 3):
        path = tmp_path / f"1-{number}-3-1{REPORT_SUFFIX}"
        path.touch()
        os.utime(path, (number, number))
    keep_newest(tmp_path, MOST_PER_USER)

    left = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob(f"*{REPORT_SUFFIX}"))
    assert list(range(3, MOST_PER_USER + 3)) == left
    assert (tmp_path / f"1-2-3{SAMPLE_SUFFIX}").exists()


def test_an_unwritable_directory_harms_nothing(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """Where nothing can be written the error stays an OutOfMemoryError, and the failure is counted."""
    (tmp_path / "file").touch()
    session = open_session(backend, run_dir=tmp_path / "file" / "run")
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)

    assert (1, {"capacity": 1}) == (
        session.errors.counts["report"],
        session._monitor.recorder.samples()[0].counters.ooms,
    )


def test_a_report_has_a_largest_size(tmp_path: Path) -> None:
    """A report that would be too large leaves out the minutes before, and is refused when that is not enough."""
    evidence = Evidence(tmp_path / f"1-2-3{SAMPLE_SUFFIX}")
    evidence.remember(SAMPLE)
    evidence.write(_scene(), _named(SAMPLE, 0))
    (length,) = (path.stat().st_size for path in tmp_path.iterdir())
    evidence.write(_scene(), _named(SAMPLE, MAX_REPORT_BYTES - length + 1))
    assert [1, 0] == [len(report.trend.seconds) for report in _reports(tmp_path)]

    with pytest.raises(ValueError, match="bytes"):
        evidence.write(_scene(), _named(SAMPLE, MAX_REPORT_BYTES))


def _named(sample: Sample, length: int) -> Sample:
    return replace(sample, process=replace(sample.process, hostname="h" * length))


@given(st.lists(st.floats(0.1, 40), max_size=400))
def test_the_history_is_bounded_in_time_and_number(pauses: list[float]) -> None:
    """However often it is fed, a trend covers five minutes at most in at most sixty points, the newest included."""
    clock = Clock()
    history = History(clock)
    added: list[float] = []
    for pause in pauses:
        clock.now += pause
        history.add(SAMPLE)
        if not added or clock.now - added[-1] >= 1:
            added.append(clock.now)
    trend = history.trend(0)

    assert len(trend.seconds) == len(trend.steps) <= MOST_POINTS
    assert list(trend.seconds) == sorted(trend.seconds, reverse=True)
    assert all(seconds <= SPAN_SECONDS for seconds in trend.seconds)
    assert [round(clock.now - moment, 1) for moment in added[-1:]] == list(trend.seconds[-1:])


def test_the_history_tells_what_was_published() -> None:
    """Each column of a trend is the value that the sample had; unknown devices have no trend."""
    history = History(Clock())
    history.add(SAMPLE)
    (device,) = SAMPLE.devices
    trend = history.trend(0)

    assert device.allocator is not None
    assert device.layout is not None
    assert (device.allocator.allocated_bytes.total,) == trend.allocated_bytes
    assert (device.layout.stranded_bytes,) == trend.stranded_bytes
    assert (device.layout.headroom_flush_bytes,) == trend.headroom_bytes
    assert (device.counters.alloc_retries, SAMPLE.steps.count) == (
        trend.alloc_retries[0],
        trend.steps[0],
    )
    assert Trend() == history.trend(1)


@pytest.mark.usefixtures("restless")
def test_the_trend_while_points_are_added() -> None:
    """An OOM in the training thread gets its trend although the background thread remembers a point meanwhile."""
    clock, ending = count(), threading.Event()
    history = History(lambda: float(next(clock)))

    def remember() -> None:
        while not ending.is_set():
            history.add(SAMPLE)

    thread = threading.Thread(target=remember)
    thread.start()
    try:
        for _ in range(3000):
            history.trend(0)
    finally:
        ending.set()
        thread.join()


def test_an_oom_in_the_midst_of_a_report(tmp_path: Path) -> None:
    """A signal handler of the script that runs out of memory while a report is written does not wait for itself."""
    handlers: list[Callable[[], None]] = []

    def clock() -> float:
        if handlers:
            handlers.pop()()
        return 1000.0

    evidence = Evidence(tmp_path / f"0-1-2{SAMPLE_SUFFIX}", clock)
    evidence.write(_scene(1), SAMPLE)
    evidence.write(_scene(2), SAMPLE)
    handlers.append(lambda: None)  # the trend asks for the time first
    handlers.insert(0, lambda: evidence.write(_scene(3), SAMPLE))
    writing = threading.Thread(target=lambda: evidence.write(_scene(4), SAMPLE), daemon=True)
    writing.start()
    writing.join(20)

    assert not writing.is_alive()
    assert {1, 4} <= {report.oom.requested_bytes for report in _reports(tmp_path)}
