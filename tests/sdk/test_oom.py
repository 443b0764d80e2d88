"""OOM reports: on disk before the exception reaches the script, bounded, and harmless."""

from __future__ import annotations

import os
import sys
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.samples import full_sample
from support.set_clock import SetClock
from support.waiting import until

from torchmem.allocator.snapshot import SegmentInfo
from torchmem.explain.oom_report import OomReport, OomTrend, decode
from torchmem.sample.run_directory import MAX_REPORT_BYTES, REPORT_SUFFIX, SAMPLE_SUFFIX
from torchmem.sample.sample import OomRecord, Sample
from torchmem.sdk.observation import OomObservation
from torchmem.sdk.oom.report_writer import (
    MAX_REPORTS_PER_PROCESS,
    MAX_REPORTS_PER_USER,
    NEW_FILE_SECONDS,
    ReportWriter,
    keep_newest,
)
from torchmem.sdk.oom.trend import MAX_TREND_POINTS, TREND_SECONDS, RecentSamples
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError

MIB = 1 << 20
Opener = Callable[..., Session]
Published = Callable[[], list[dict[str, Any]]]
SAMPLE = full_sample()


def _observation(requested: int = 1) -> OomObservation:
    return OomObservation(0, OomRecord(1_700_000_000.0, requested, "capacity"), 0, None, None, None)


def _report_paths(directory: Path) -> list[Path]:
    return sorted(
        directory.rglob(f"*{REPORT_SUFFIX}"),
        key=lambda path: int(path.name.split("-")[-1].split(".")[0]),
    )


def _read_reports(directory: Path) -> list[OomReport]:
    return [decode(path.read_bytes()) for path in _report_paths(directory)]


def has_layout(published: Published) -> bool:
    """Whether the periodic snapshot is published."""
    return any(device["layout"] for sample in published() for device in sample["devices"])


def oom_counts(text: str) -> dict[str, float]:
    """`torchmem_ooms_total` by cause."""
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {
        sample.labels["cause"]: sample.value
        for sample in samples
        if sample.name == "torchmem_ooms_total"
    }


def test_the_report_is_there_before_the_exception(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
    tmp_path: Path,
) -> None:
    """A caught error has a complete report: cause, and the state before and after the flush."""
    blocks = [allocator.malloc(16 * MIB - (index % 2) * 12 * MIB) for index in range(100)]
    for block in blocks[::2]:
        allocator.free(block)
    whole = allocator.malloc(20 * MIB)
    allocator.free(whole)
    open_session(backend, interval=0.01)
    until(lambda: has_layout(published))
    backend.step()

    with pytest.raises(OutOfMemoryError):
        allocator.malloc(700 * MIB)

    (report,) = _read_reports(tmp_path)
    assert (
        report.oom.cause,
        report.oom.detail,
        report.oom.requested_bytes,
    ) == ("fragmentation", "stranded", 700 * MIB)
    assert report.layout is not None
    assert report.layout_before is not None
    assert (report.layout.releasable_bytes, report.layout_before.releasable_bytes) == (0, 20 * MIB)
    assert report.layout.stranded_bytes == report.cached_free_bytes > 700 * MIB
    assert allocator.gpu.mem_get_info()[0] == report.driver_free_bytes
    assert (report.steps.count, report.limit_bytes) == (1, None)
    assert report.allocator_settings["backend"] == "native"
    assert report.gradients_enabled is True


def test_a_block_on_another_stream_is_reported(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """The report shows that another stream's free block would serve the request."""
    open_session(backend)
    side = allocator.malloc(800 * MIB, stream=7)
    allocator.free(side)
    allocator.malloc(2 * MIB, stream=7)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(600 * MIB, stream=0)

    assert [report.oom.detail for report in _read_reports(tmp_path)] == ["stream"]


def test_the_layout_before_is_the_periodic_one(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
    tmp_path: Path,
) -> None:
    """Two OOMs in a row both show the periodic snapshot, not what the first one left."""
    allocator.free(allocator.malloc(500 * MIB))
    open_session(backend, interval=0.01)
    until(lambda: has_layout(published))
    for _ in range(2):
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(2048 * MIB)

    first, second = _read_reports(tmp_path)
    assert first.layout_before == second.layout_before
    assert first.layout_before is not None
    assert first.layout_before.releasable_bytes == 500 * MIB


class BrokenBackend(SimulatedBackend):
    """Its snapshots cannot be read, or have stacks that cannot."""

    has_snapshots = True

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        """Return a snapshot with stacks that are no stacks."""
        if not self.has_snapshots:
            raise ValueError("snapshot")
        segments: Any = super().memory_snapshot()
        for segment in segments:
            for block in segment["blocks"]:
                block["frames"] = [None]
        return list(segments)


@pytest.mark.parametrize("has_snapshots", [True, False])
def test_an_oom_counts_if_its_examination_fails(
    allocator: DeviceCachingAllocator, open_session: Opener, tmp_path: Path, has_snapshots: bool
) -> None:
    """If part of the state cannot be read, the OOM is counted and reported without it."""
    backend = BrokenBackend([allocator])
    backend.has_snapshots = has_snapshots
    allocator.malloc(MIB)
    session = open_session(backend)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)

    assert session.newest
    (device,) = session.newest.devices
    assert device.counters.ooms == {"capacity": 1}
    assert session.errors.counts["oom"] == 1
    assert [report.oom.requested_bytes for report in _read_reports(tmp_path)] == [2048 * MIB]


def test_a_search_for_the_batch_size_leaves_few_files(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
    tmp_path: Path,
) -> None:
    """A hundred caught OOMs leave the first and the newest report, and all are counted."""
    session = open_session(backend)
    for index in range(100):
        with pytest.raises(OutOfMemoryError):
            allocator.malloc((2048 + 2 * index) * MIB)

    assert [report.oom.requested_bytes for report in _read_reports(tmp_path)] == [
        2048 * MIB,
        2246 * MIB,
    ]
    assert published()[0]["devices"][0]["counters"]["ooms"] == {"capacity": 100}
    assert sum(session.errors.counts.values()) == 0


@given(st.lists(st.floats(0, 2 * NEW_FILE_SECONDS), min_size=1, max_size=40))
def test_the_newest_oom_is_always_on_disk(
    tmp_path_factory: pytest.TempPathFactory, pauses: list[float]
) -> None:
    """The last file always holds the last OOM, and a process never exceeds its number of files."""
    folder, clock = tmp_path_factory.mktemp("run"), SetClock()
    reports = ReportWriter(folder / f"1-2-3{SAMPLE_SUFFIX}", clock)
    for number, pause in enumerate(pauses):
        clock.now += pause
        reports.write(_observation(number), SAMPLE)

        paths = _report_paths(folder)
        assert number == decode(paths[-1].read_bytes()).oom.requested_bytes
        assert len(paths) <= MAX_REPORTS_PER_PROCESS


def test_reports_of_a_process_that_went_on_say_so(tmp_path: Path) -> None:
    """All reports until then are marked in their place; a later one, and one in doubt, is not."""
    clock = SetClock()
    reports = ReportWriter(tmp_path / f"1-2-3{SAMPLE_SUFFIX}", clock)
    for number in range(2):
        reports.write(_observation(number), SAMPLE)
        os.utime(_report_paths(tmp_path)[-1], (number, number))
    reports.mark_survived(lambda: True)
    assert [report.survived for report in _read_reports(tmp_path)] == [False, False]

    reports.mark_survived(lambda: False)
    reports.write(_observation(2), SAMPLE)
    read = _read_reports(tmp_path)
    assert [report.survived for report in read] == [True, False]
    assert [report.oom.requested_bytes for report in read] == [0, 2]
    assert _report_paths(tmp_path)[0].stat().st_mtime == 0


def test_a_user_keeps_a_bounded_number(tmp_path: Path) -> None:
    """Over all processes the oldest reports are removed first; other files stay."""
    (tmp_path / f"1-2-3{SAMPLE_SUFFIX}").touch()
    for number in range(MAX_REPORTS_PER_USER + 3):
        path = tmp_path / f"1-{number}-3-1{REPORT_SUFFIX}"
        path.touch()
        os.utime(path, (number, number))
    keep_newest(tmp_path, MAX_REPORTS_PER_USER)

    left = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob(f"*{REPORT_SUFFIX}"))
    assert list(range(3, MAX_REPORTS_PER_USER + 3)) == left
    assert (tmp_path / f"1-2-3{SAMPLE_SUFFIX}").exists()


def test_files_of_others_do_not_delay_an_oom(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """At an OutOfMemoryError only this user's own directory is listed."""
    open_session(backend)
    backend.step()
    listed, is_recording = list[object](), True

    def record(event: str, arguments: tuple[object, ...]) -> None:
        if is_recording and event in {"os.scandir", "os.listdir", "glob.glob"}:
            listed.append(arguments[0])

    sys.addaudithook(record)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)
    is_recording = False

    assert len(_report_paths(tmp_path)) == 1
    assert {str(tmp_path / str(os.geteuid()))} == set(map(str, listed))


def test_an_unwritable_directory_does_no_harm(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """Without a writable directory the OutOfMemoryError is unchanged, and everything is counted."""
    (tmp_path / "file").touch()
    session = open_session(backend, run_dir=tmp_path / "file" / "run", port=0, interval=0.01)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)

    url = until(lambda: session.url)
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - loopback
        text = answer.read().decode()
    assert [value for cause, value in oom_counts(text).items() if cause == "capacity"] == [1.0]
    assert session.errors.counts["report"] == 1


def test_a_report_is_bounded_in_size(tmp_path: Path) -> None:
    """A report that is too large omits the trend, and is not written if that is not enough."""
    reports = ReportWriter(tmp_path / f"1-2-3{SAMPLE_SUFFIX}")
    reports.remember(SAMPLE)
    reports.write(_observation(), _named(SAMPLE, 0))
    (length,) = (path.stat().st_size for path in _report_paths(tmp_path))
    reports.write(_observation(), _named(SAMPLE, MAX_REPORT_BYTES - length + 1))
    assert [len(report.trend.seconds) for report in _read_reports(tmp_path)] == [1, 0]

    with pytest.raises(ValueError, match="bytes"):
        reports.write(_observation(), _named(SAMPLE, MAX_REPORT_BYTES))


def _named(sample: Sample, length: int) -> Sample:
    return replace(sample, process=replace(sample.process, hostname="h" * length))


@given(st.lists(st.floats(0.1, 40), max_size=400))
def test_the_history_is_bounded_in_time_and_number(pauses: list[float]) -> None:
    """A trend covers at most five minutes in at most sixty points, the newest included."""
    clock = SetClock()
    history = RecentSamples(clock)
    added: list[float] = []
    for pause in pauses:
        clock.now += pause
        history.add(SAMPLE)
        if not added or clock.now - added[-1] >= 1:
            added.append(clock.now)
    trend = history.trend(0)

    assert len(trend.seconds) == len(trend.steps) <= MAX_TREND_POINTS
    assert list(trend.seconds) == sorted(trend.seconds, reverse=True)
    assert all(seconds <= TREND_SECONDS for seconds in trend.seconds)
    assert [round(clock.now - time, 1) for time in added[-1:]] == list(trend.seconds[-1:])


def test_the_history_keeps_what_was_published() -> None:
    """Each column of a trend is the sample's value; unknown devices have no trend."""
    history = RecentSamples(SetClock())
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
    assert OomTrend() == history.trend(1)


@pytest.mark.usefixtures("restless")
def test_a_trend_while_points_are_added() -> None:
    """An OOM gets its trend although the background thread adds a point at the same time."""
    clock, begun, ending = count(), threading.Event(), threading.Event()
    history = RecentSamples(lambda: float(next(clock)))

    def remember() -> None:
        while not ending.is_set():
            history.add(SAMPLE)
            begun.set()

    thread = threading.Thread(target=remember)
    thread.start()
    try:
        assert begun.wait(60)
        trends = [history.trend(0) for _ in range(3000)]
    finally:
        ending.set()
        thread.join()

    assert any(trend.seconds for trend in trends)


def test_an_oom_during_a_report(tmp_path: Path) -> None:
    """A signal handler that runs out of memory while a report is written does not deadlock."""
    handlers: list[Callable[[], object]] = []

    def clock() -> float:
        if handlers:
            handlers.pop()()
        return 1000.0

    reports = ReportWriter(tmp_path / f"0-1-2{SAMPLE_SUFFIX}", clock)
    reports.write(_observation(1), SAMPLE)
    reports.write(_observation(2), SAMPLE)
    handlers.append(lambda: None)  # the trend reads the clock first
    handlers.insert(0, lambda: reports.write(_observation(3), SAMPLE))
    writing = threading.Thread(target=lambda: reports.write(_observation(4), SAMPLE), daemon=True)
    writing.start()
    writing.join(120)

    assert not writing.is_alive()
    assert {1, 4} <= {report.oom.requested_bytes for report in _read_reports(tmp_path)}
