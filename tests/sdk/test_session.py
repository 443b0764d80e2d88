"""A session reads the allocator at step ends and in the background, and does no harm."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.threads import SAMPLER, thread_names
from support.waiting import until

from torchmem.allocator.backend import Device, OomObserver
from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.explain.oom_report import decode
from torchmem.explain.remedies import remedies
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.sdk import current_session, instrument
from torchmem.sdk.reading.device import MonotonicCounter
from torchmem.sdk.session import Session
from torchmem.sdk.settings import Settings
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError

MIB = 1 << 20
Opener = Callable[..., Session]
Published = Callable[[], list[dict[str, Any]]]


def test_the_step_hook_reads_what_pytorch_knows(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """After a step the published numbers are those of the allocator."""
    session = open_session(backend)
    allocator.malloc(30 * MIB)
    backend.step()
    session.close()

    (sample,) = published()
    stats = allocator.memory_stats_as_nested_dict()
    device = sample["devices"][0]
    assert (
        stats["reserved_bytes"]["large_pool"]["current"]
        == device["allocator"]["reserved_bytes"]["large"]
    )
    assert stats["allocated_bytes"]["all"]["peak"] == device["allocator"]["allocated_peak_bytes"]
    assert (sample["steps"]["count"], sample["ended"]) == (1, "exited")


def test_nothing_happens_before_cuda_is_up(
    allocator: DeviceCachingAllocator, open_session: Opener, tmp_path: Path
) -> None:
    """Before CUDA is initialized no thread runs and no file exists, even if steps are seen."""
    backend = SimulatedBackend([allocator], initialized=False)
    session = open_session(backend, interval=0.01)
    backend.step()

    assert list(tmp_path.iterdir()) == []
    assert session.url is None

    backend.init()
    backend.step()
    session.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_provisional_session_yields_until_cuda_is_up(
    allocator: DeviceCachingAllocator, tmp_path: Path
) -> None:
    """The script's own settings replace those of a tool, but not of a session that publishes."""
    backend = SimulatedBackend([allocator], initialized=False)
    first = instrument(backend=backend, run="tool", run_dir=tmp_path)
    first.provisional = True
    assert first is instrument()
    second = instrument(backend=backend, run="script", run_dir=tmp_path)
    second.provisional = True
    backend.init()
    third = instrument(backend=backend, run="late", run_dir=tmp_path)
    current = current_session()
    third.close()

    assert (first.closed, second.settings.run) == (True, "script")
    assert (second is third is current, current_session()) == (True, None)


class Distributed(SimulatedBackend):
    """Its script creates a process group, and destroys it."""

    group: tuple[int, int] | None = None

    def world(self) -> tuple[int, int] | None:
        return self.group


def test_a_process_group_created_after_cuda_gives_the_rank(
    allocator: DeviceCachingAllocator, open_session: Opener, published: Published
) -> None:
    """The rank in torch.distributed is published once it is known, and kept to the end."""
    backend = Distributed([allocator])
    session = open_session(backend, {"RANK": "1"}, interval=0.01)
    allocator.malloc(MIB)
    until(lambda: _ranks(published()) == [1])
    backend.group = (5, 8)
    until(lambda: _ranks(published()) == [5])
    backend.group = None
    session.close()

    assert [(s["process"]["rank"], s["process"]["world_size"]) for s in published()] == [(5, 8)]


def _ranks(samples: list[dict[str, Any]]) -> list[int]:
    return [sample["process"]["rank"] for sample in samples]


class CountingBackend(SimulatedBackend):
    """Counts the calls before CUDA is up that would start the driver."""

    calls = 0

    def devices(self) -> Sequence[Device]:
        self.calls += not self.is_initialized()
        return super().devices()


def test_a_phase_before_cuda_is_up(allocator: DeviceCachingAllocator, open_session: Opener) -> None:
    """A phase that begins before CUDA is initialized makes no driver call, even with resets."""
    backend = CountingBackend([allocator], initialized=False)
    session = open_session(backend, reset_peaks=True)
    with session.phase("data"):
        pass

    assert backend.calls == 0


def test_peaks_survive_other_tools_resets(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """A peak that was seen stays the high-water mark after the user resets PyTorch's."""
    session = open_session(backend, interval=1e-9)
    block = allocator.malloc(100 * MIB)
    backend.step()
    allocator.free(block)
    allocator.reset_peak_memory_stats()
    backend.step()
    session.close()

    assert published()[0]["devices"][0]["allocator"]["allocated_peak_bytes"] == 100 * MIB


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=30))
def test_counters_are_monotone_through_resets(events: list[tuple[int, bool]]) -> None:
    """Whenever the user resets the source, the total equals all increments that were seen."""
    counter, source, true_total, last = MonotonicCounter(), 0, 0, 0
    for increment, reset in events:
        source = increment if reset else source + increment
        counter.update(source)
        # A reset followed by a larger value looks like growth.
        true_total += source - last if source >= last else source
        last = source
        assert true_total == counter.total


def test_an_oom_is_published_before_the_exception_reaches_the_script(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """When the error is caught, the file already holds cause and request, and marks it pending."""
    open_session(backend)
    backend.step()

    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)

    (sample,) = published()
    device = sample["devices"][0]
    assert device["counters"]["ooms"] == {"capacity": 1}
    assert (
        device["last_oom"]["requested_bytes"],
        device["last_oom"]["cause"],
        device["last_oom"]["remedy"],
    ) == (2048 * MIB, "capacity", None)  # it was published before the report was written
    assert sample["oom_pending"]


def test_the_first_advice_of_the_report_is_in_the_next_sample(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
    tmp_path: Path,
) -> None:
    """Series then say the same as the report on disk."""
    session = open_session(backend)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)
    session.close()

    (path,) = tmp_path.rglob(f"*{REPORT_SUFFIX}")
    (device,) = published()[0]["devices"]
    assert device["last_oom"]["remedy"] == remedies(decode(path.read_bytes()))[0].kind


def test_an_oom_despite_stranded_bytes_is_fragmentation(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """If the free bytes are enough but not contiguous, the cause is fragmentation."""
    open_session(backend)
    blocks = [allocator.malloc(16 * MIB - (index % 2) * 12 * MIB) for index in range(100)]
    for block in blocks[::2]:
        allocator.free(block)

    with pytest.raises(OutOfMemoryError):
        allocator.malloc(700 * MIB)

    (device,) = published()[0]["devices"]
    assert device["counters"]["ooms"] == {"fragmentation": 1}
    assert device["layout"]["headroom_flush_bytes"] < device["last_oom"]["requested_bytes"]
    assert device["layout"]["stranded_bytes"] > device["last_oom"]["requested_bytes"]


def test_an_oom_while_a_fitting_block_waits_is_pending(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """A block that fits and waited for a stream gives the cause pending; a second try succeeds."""
    open_session(backend)
    allocator.free(allocator.malloc(900 * MIB))
    allocator.malloc(30 * MIB)
    block = allocator.malloc(600 * MIB)
    allocator.record_stream(block, 7)
    allocator.gpu.hold_events(True)
    allocator.free(block)

    with pytest.raises(OutOfMemoryError):
        allocator.malloc(500 * MIB)
    allocator.malloc(500 * MIB)

    (device,) = published()[0]["devices"]
    assert device["counters"]["ooms"] == {"pending": 1}
    assert (
        device["layout"]["pending_free_bytes"],
        device["last_oom"]["cause"],
    ) == (0, "pending")


def test_a_survived_oom_is_not_a_death(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """Once a step has ended after a caught OOM, only the counter shows it."""
    session = open_session(backend)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)
    backend.step()
    session.close()

    (sample,) = published()
    assert (sample["oom_pending"], sample["ended"]) == (False, "exited")
    assert sample["devices"][0]["counters"]["ooms"] == {"capacity": 1}


class FailingBackend(SimulatedBackend):
    """An allocator whose reads raise."""

    def memory_stats(self, device: int) -> NestedStats | None:
        raise RuntimeError("broken stats")

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        raise RuntimeError("broken snapshot")

    def on_oom(self, observer: OomObserver) -> None:
        super().on_oom(observer)


def test_a_broken_reader_never_reaches_training(
    allocator: DeviceCachingAllocator, open_session: Opener
) -> None:
    """If every read fails, training and its OutOfMemoryError are unchanged; errors are counted."""
    backend = FailingBackend([allocator])
    session = open_session(backend)
    backend.step()

    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)

    assert (session.errors.counts["stats"], session.errors.counts["oom"]) == (1, 1)


def test_explicit_steps_replace_the_optimizer_hook(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """From the first `step()` on, only the script's own calls count steps and samples."""
    session = open_session(backend)
    session.step(samples=32)
    backend.step()
    session.step(samples=32)
    session.close()

    assert (published()[0]["steps"]["count"], published()[0]["steps"]["samples"]) == (2, 64)


def test_the_session_is_a_context_manager(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """Leaving `with` marks the end; closing again changes nothing."""
    with open_session(backend) as session:
        backend.step()
    session.close()

    assert session.closed
    assert published()[0]["ended"] == "exited"


def test_an_unwritable_run_directory_is_counted_and_recovers(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """While the directory cannot be created training goes on; later, publication resumes."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    session = open_session(backend, run_dir=blocked / "run", interval=0.01)
    backend.step()
    until(lambda: session.errors.counts["publish"])

    blocked.unlink()
    assert until(lambda: list(tmp_path.glob("file/run/*/*.json")))


def test_statistics_and_layout_come_without_any_step(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """An inference process that never steps still shows bytes, fragmentation, and headroom."""
    first = allocator.malloc(400 * MIB)
    allocator.malloc(8 * MIB)
    allocator.free(first)
    open_session(backend, interval=0.01, idle_after=0.01)

    devices = until(lambda: [d for sample in published() for d in sample["devices"] if d["layout"]])

    assert devices[0]["allocator"]["reserved_bytes"]["large"] == 420 * MIB
    assert devices[0]["layout"]["releasable_bytes"] == 400 * MIB
    assert devices[0]["layout"]["headroom_flush_bytes"] == 1004 * MIB


def test_a_snapshot_follows_soon_when_memory_is_taken(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """An early snapshot, taken before the first step has reserved its memory, is replaced."""
    kept = allocator.malloc(8 * MIB)
    open_session(backend, interval=0.01, idle_after=0.01, snapshot_interval=3600.0)

    def layout() -> dict[str, Any]:
        known = [d["layout"] for sample in published() for d in sample["devices"] if d["layout"]]
        return dict(known[0]) if known else {}

    until(lambda: layout().get("in_use_bytes") == kept.size)
    allocator.free(allocator.malloc(400 * MIB))
    backend.step()
    until(lambda: layout()["releasable_bytes"] == 400 * MIB)


class InterruptingBackend(SimulatedBackend):
    """A GPU whose snapshot fails; knows whether a call interrupts the main thread."""

    is_interrupting = False

    def call_soon(self, call: Callable[[], None]) -> None:
        self.is_interrupting = True
        super().call_soon(call)
        self.is_interrupting = False

    def memory_snapshot(self) -> None:
        raise RuntimeError("no layout")


class RecordingHandler(logging.Handler):
    """Notes for each message whether it was logged while the main thread was interrupted."""

    def __init__(self, backend: InterruptingBackend) -> None:
        super().__init__()
        self.messages: dict[str, bool] = {}
        self._backend = backend

    def emit(self, record: logging.LogRecord) -> None:
        self.messages[record.getMessage()] = self._backend.is_interrupting


def test_nothing_is_logged_while_the_script_is_interrupted(
    allocator: DeviceCachingAllocator, open_session: Opener
) -> None:
    """Errors between two bytecodes of the script, which may hold its log lock, are logged later."""
    backend = InterruptingBackend([allocator])
    handler = RecordingHandler(backend)
    logger = logging.getLogger("torchmem")
    logger.addHandler(handler)
    try:
        open_session(backend, interval=0.01, idle_after=0.01)
        until(lambda: handler.messages)
    finally:
        logger.removeHandler(handler)

    assert handler.messages == {
        "torchmem: snapshot failed and was skipped (RuntimeError: no layout)": False
    }


def test_instrument_logs_once_what_it_monitors(
    allocator: DeviceCachingAllocator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One message at INFO names rank, run, pid and place; so does the representation."""
    monkeypatch.setenv("TORCHMEM_RUN_DIR", str(tmp_path))
    backend = SimulatedBackend([allocator], initialized=False)
    with caplog.at_level(logging.INFO, "torchmem"):
        session = instrument(backend=backend, run="resnet", rank=3)
        instrument()

    identity = f"rank 3 of run 'resnet', pid {os.getpid()}"
    assert caplog.messages == [f"torchmem: {identity}, waiting for CUDA, {tmp_path}"]
    backend.init()
    assert f"<torchmem.sdk.Session: {identity}, monitoring, {tmp_path}" in repr(session)
    session.close()
    assert "closed" in repr(session)
    with instrument(enabled=False) as idle:
        assert repr(idle) == "<torchmem.sdk.Session: inactive>"


def test_the_sampler_survives_extreme_intervals(
    backend: SimulatedBackend, tmp_path: Path, published: Published
) -> None:
    """Settings made without `instrument` may hold any interval, and the thread survives it."""
    for interval in (1e10, 1e-30):
        session = Session(Settings(run_dir=tmp_path, interval=interval), backend, {})
        backend.step()
        time.sleep(0.01)
        until(lambda: SAMPLER in thread_names())
        session.close()

    assert published()
