"""`Session.wait_for_memory` takes what it waited for, and `Session.idle` gives without delay."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.backend import HeldBlock, OomObserver
from torchmem.allocator.settings import AllocatorConfig
from torchmem.sdk.release.held_blocks import UNIT_BYTES, segment_sizes
from torchmem.sdk.session import Session
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import GpuUse, SimulatedGpu

MIB = 1 << 20
Opener = Callable[..., Session]
Published = Callable[[], list[dict[str, Any]]]


@given(st.integers(0, 1 << 40), st.booleans())
def test_segments_add_up_to_what_is_missing(missing: int, expandable: bool) -> None:
    """They lack less than one unit of cudaMalloc, and are few."""
    sizes = segment_sizes(missing, expandable=expandable)

    assert 0 <= missing - sum(sizes) < UNIT_BYTES
    assert all(size > 0 and size % UNIT_BYTES == 0 for size in sizes)
    assert len(sizes) <= (1 if expandable else 12)


class Rank:
    """A process on a GPU of 4 GiB, whose steps read the statistics."""

    def __init__(
        self,
        open_session: Opener,
        backend: type[SimulatedBackend] = SimulatedBackend,
        config: AllocatorConfig | None = None,
        **settings: Any,
    ) -> None:
        self.gpu = SimulatedGpu(4096 * MIB, context_bytes=0, use=GpuUse([0, 0]), uuid="GPU-1")
        self.allocator = DeviceCachingAllocator(self.gpu, config=config or AllocatorConfig())
        self.backend = backend([self.allocator])
        self.session = open_session(self.backend, interval=1e-6, release_interval=1e-6, **settings)
        self.train(100)

    def train(self, *peaks: int) -> None:
        """Run a step for each peak in MiB."""
        for peak in peaks:
            self.allocator.free(self.allocator.malloc(peak * MIB))
            self.backend.step()

    @property
    def segments(self) -> list[int]:
        """The sizes of the segments that it holds, in MiB."""
        return sorted(each["total_size"] // MIB for each in self.allocator.memory_snapshot())


def test_what_a_process_waits_for_it_takes(open_session: Opener, published: Published) -> None:
    """Afterwards the memory is in its cache, in halves, and no peak shows it."""
    rank = Rank(open_session, release="neighbors")

    assert rank.session.wait_for_memory(3000 * MIB)
    assert rank.segments == [100, 1500, 1500]
    assert rank.session.wait_for_memory(3000 * MIB), "it is there already"
    assert rank.segments == [100, 1500, 1500]
    rank.session.close()
    assert published()[0]["devices"][0]["allocator"]["active_peak_bytes"] == 100 * MIB


def test_segments_in_the_way_go_back_first(open_session: Opener) -> None:
    """If the driver has too little beside the process's own small segments, they are returned."""
    rank = Rank(open_session, release="neighbors")
    rank.train(*range(100, 900, 100))

    assert rank.session.wait_for_memory(4000 * MIB)
    assert rank.segments == [2000, 2000]
    assert rank.allocator.memory_stats_as_nested_dict()["num_alloc_retries"] == 0


def test_what_is_cached_in_large_segments_is_not_taken_again(open_session: Opener) -> None:
    """Only the missing part comes from the driver, and the large segments stay."""
    rank = Rank(open_session, release="neighbors")
    rank.train(2000)

    assert rank.session.wait_for_memory(3900 * MIB)
    assert rank.segments == [100, 1900, 2000]
    assert rank.session.wait_for_memory(4000 * MIB)
    assert rank.segments == [100, 1900, 2000], "the driver has no more"


def test_expandable_segments_are_taken_in_one_piece(open_session: Opener) -> None:
    """They return single pages, so that one large range pins nothing."""
    config = AllocatorConfig(expandable_segments=True)
    rank = Rank(open_session, config=config, release="neighbors")

    assert rank.session.wait_for_memory(3000 * MIB)
    assert 3000 <= sum(rank.segments) < 3150


@pytest.mark.parametrize(
    ("release", "keywords"), [("neighbors", {"take": False}), ("cache", {}), (None, {})]
)
def test_nothing_is_taken_unasked(
    open_session: Opener, release: str | None, keywords: dict[str, Any]
) -> None:
    """Without the tier, or with take=False, waiting allocates nothing."""
    rank = Rank(open_session, release=release)

    assert rank.session.wait_for_memory(2000 * MIB, **keywords)
    assert rank.segments == [100]


def test_a_memory_fraction_limits_what_is_taken(open_session: Opener) -> None:
    """What the process's own limit forbids is not waited for."""
    rank = Rank(open_session, release="neighbors")
    rank.allocator.set_memory_fraction(0.5)

    assert rank.session.wait_for_memory(1900 * MIB)
    assert not rank.session.wait_for_memory(3000 * MIB, timeout=0.05)
    assert sum(rank.segments) <= 2048


class Raced(SimulatedBackend):
    """At the first attempt another process is faster, and the retry of PyTorch fails."""

    attempts = 0

    def on_oom(self, observer: OomObserver) -> None:
        """Call none: a block that is held calls none."""

    @contextmanager
    def hold(self, blocks: Sequence[HeldBlock]) -> Iterator[int]:
        self.attempts += 1
        if self.attempts > 1:
            with super().hold(blocks) as held:
                yield held
            return
        (allocator,) = self._allocators.values()
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(8192 * MIB)
        yield 0


def test_a_faster_process_costs_nothing_but_time(
    open_session: Opener, published: Published
) -> None:
    """Waiting goes on, and the failed attempt counts neither as a retry nor as an OOM."""
    rank = Rank(open_session, Raced, release="neighbors")

    assert rank.session.wait_for_memory(3000 * MIB)
    rank.session.close()

    counters = published()[0]["devices"][0]["counters"]
    assert counters["alloc_retries"] == 0
    assert rank.allocator.memory_stats_as_nested_dict()["num_alloc_retries"] == 1


def test_an_idle_session_is_not_stalled(open_session: Opener, published: Published) -> None:
    """In `with session.idle()` no step is expected, and afterwards it is."""
    rank = Rank(open_session, stall_after=60.0)

    def stall_after(*, idle: bool) -> float | None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            values: list[float | None] = [each["stall_after_seconds"] for each in published()]
            if values and (values[0] is None) == idle:
                return values[0]
            time.sleep(0.002)
        raise AssertionError(json.dumps(published()))

    with rank.session.idle():
        assert stall_after(idle=True) is None
    rank.train(100)
    assert stall_after(idle=False) == 60.0
