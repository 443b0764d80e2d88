"""A session reads the allocator at step ends, keeps what must be kept, and harms nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from torchmem.allocator.backend import Device, OomObserver
from torchmem.allocator.snapshot import NestedStats, SegmentInfo
from torchmem.sdk._device import Monotone
from torchmem.sdk._session import Session
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
    assert (1, "exited") == (sample["steps"]["count"], sample["ended"])


def test_nothing_happens_before_cuda_is_up(
    allocator: DeviceCachingAllocator, open_session: Opener, tmp_path: Path
) -> None:
    """Before CUDA is initialised no thread runs and no file exists, even when steps are seen."""
    backend = SimulatedBackend([allocator], initialized=False)
    session = open_session(backend, interval=0.01)
    backend.step()

    assert [] == list(tmp_path.iterdir())
    assert session.url is None

    backend.init()
    backend.step()
    session.close()
    assert 1 == len(list(tmp_path.iterdir()))


class Unstarted(SimulatedBackend):
    """CUDA is not up, and asking for its cards, which would start the driver, is counted."""

    asked = 0

    def devices(self) -> Sequence[Device]:
        self.asked += not self.is_initialized()
        return super().devices()


def test_a_phase_before_cuda_is_up(allocator: DeviceCachingAllocator, open_session: Opener) -> None:
    """A phase that begins before CUDA is initialised asks the driver nothing, also where it resets the peaks."""
    backend = Unstarted([allocator], initialized=False)
    session = open_session(backend, reset_peaks=True)
    with session.phase("data"):
        pass

    assert 0 == backend.asked


def test_peaks_survive_other_tools_resets(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """A peak seen once stays the high-water mark when the user resets PyTorch's."""
    session = open_session(backend, interval=1e-9)
    block = allocator.malloc(100 * MIB)
    backend.step()
    allocator.free(block)
    allocator.reset_peak_memory_stats()
    backend.step()
    session.close()

    assert 100 * MIB == published()[0]["devices"][0]["allocator"]["allocated_peak_bytes"]


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=30))
def test_counters_are_monotone_through_resets(events: list[tuple[int, bool]]) -> None:
    """Whenever the user resets the source, the total still equals all increments that were seen."""
    counter, source, true_total, last = Monotone(), 0, 0, 0
    for increment, reset in events:
        source = increment if reset else source + increment
        counter.update(source)
        # A reset hidden behind a larger new value cannot be told from growth; nobody can see it.
        true_total += source - last if source >= last else source
        last = source
        assert true_total == counter.total


def test_an_oom_is_published_before_the_exception_reaches_the_script(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """When OutOfMemoryError is caught, the file already tells cause, request and that no step followed."""
    open_session(backend)
    backend.step()

    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)

    (sample,) = published()
    device = sample["devices"][0]
    assert {"capacity": 1} == device["counters"]["ooms"]
    assert (2048 * MIB, "capacity") == (
        device["last_oom"]["requested_bytes"],
        device["last_oom"]["cause"],
    )
    assert sample["oom_pending"]


def test_an_oom_among_stranded_bytes_is_fragmentation(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """Enough free bytes, none in one piece: the cause is fragmentation."""
    open_session(backend)
    blocks = [allocator.malloc(16 * MIB - (index % 2) * 12 * MIB) for index in range(100)]
    for block in blocks[::2]:
        allocator.free(block)

    with pytest.raises(OutOfMemoryError):
        allocator.malloc(700 * MIB)

    (device,) = published()[0]["devices"]
    assert {"fragmentation": 1} == device["counters"]["ooms"]
    assert device["layout"]["headroom_flush_bytes"] < device["last_oom"]["requested_bytes"]
    assert device["layout"]["stranded_bytes"] > device["last_oom"]["requested_bytes"]


def test_a_survived_oom_is_not_a_death(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    published: Published,
) -> None:
    """Once a step has finished after a caught OOM, only the counter remembers it."""
    session = open_session(backend)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)
    backend.step()
    session.close()

    (sample,) = published()
    assert (False, "exited") == (sample["oom_pending"], sample["ended"])
    assert {"capacity": 1} == sample["devices"][0]["counters"]["ooms"]


class FailingBackend(SimulatedBackend):
    """An allocator whose every question raises."""

    def memory_stats(self, device: int) -> NestedStats | None:
        raise RuntimeError("broken stats")

    def memory_snapshot(self) -> list[SegmentInfo] | None:
        raise RuntimeError("broken snapshot")

    def on_oom(self, observer: OomObserver) -> None:
        super().on_oom(observer)


def test_a_broken_reader_never_reaches_training(
    allocator: DeviceCachingAllocator, open_session: Opener
) -> None:
    """Steps go on and an OOM stays an OutOfMemoryError when every read fails; the failures are counted."""
    backend = FailingBackend([allocator])
    session = open_session(backend)
    backend.step()

    with pytest.raises(OutOfMemoryError):
        allocator.malloc(2048 * MIB)

    assert (1, 1) == (session.errors.counts["stats"], session.errors.counts["oom"])


def test_explicit_steps_replace_the_optimizer_hook(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """From the first `step()` on, steps and samples are what the script says."""
    session = open_session(backend)
    session.step(samples=32)
    backend.step()
    session.step(samples=32)
    session.close()

    assert (2, 64) == (published()[0]["steps"]["count"], published()[0]["steps"]["samples"])


def test_the_session_is_a_context_manager(
    backend: SimulatedBackend, open_session: Opener, published: Published
) -> None:
    """Leaving `with` marks the end; closing again changes nothing."""
    with open_session(backend) as session:
        backend.step()
    session.close()

    assert session.closed
    assert "exited" == published()[0]["ended"]


def test_an_unwritable_run_directory_is_counted_and_recovers(
    backend: SimulatedBackend,
    allocator: DeviceCachingAllocator,
    open_session: Opener,
    tmp_path: Path,
) -> None:
    """While the directory cannot be made training goes on; once it can, publication resumes by itself."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    session = open_session(backend, run_dir=blocked / "run", interval=0.01)
    backend.step()
    until(lambda: session.errors.counts["publish"])

    blocked.unlink()
    assert until(lambda: list(tmp_path.glob("file/run/*.json")))
