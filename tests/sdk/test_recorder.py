"""What is read at different moments, and what is published of it."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import MIB
from torchmem.sample.sample import DeviceSample
from torchmem.sdk.reading.recorder import Recorder
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.backend import SimulatedBackend
from torchmem.simulator.gpu import SimulatedGpu

sizes = st.lists(st.integers(1, 200 * MIB), max_size=12)


def published(recorder: Recorder) -> DeviceSample:
    """Return the only device as it is published."""
    (device,) = recorder.samples()
    return device


def test_the_statistics_have_a_time_of_their_own() -> None:
    """The time at which the statistics were read is published beside that of the snapshot."""
    recorder = Recorder(SimulatedBackend([DeviceCachingAllocator(SimulatedGpu(1024 * MIB))]))
    before = time.time()
    recorder.read_stats()
    recorder.take_snapshot()
    recorder.measure_snapshot()
    between = time.time()
    recorder.read_stats()

    device = published(recorder)
    assert device.layout is not None
    assert device.stats_timestamp is not None
    assert before <= device.layout.timestamp <= between <= device.stats_timestamp


@given(sizes, st.integers(0, 1024 * MIB), sizes, st.booleans())
def test_headroom_is_never_above_what_is_left_now(
    taken: list[int], others: int, taken_later: list[int], expandable: bool
) -> None:
    """What others and the process itself have taken since the snapshot lowers the headroom."""
    gpu = SimulatedGpu(1024 * MIB, context_bytes=0)
    config = AllocatorConfig(expandable_segments=expandable)
    allocator = DeviceCachingAllocator(gpu, 0, config)
    recorder = Recorder(SimulatedBackend([allocator]))
    for size in taken:
        if gpu.mem_get_info()[0] > size + 40 * MIB:
            allocator.free(allocator.malloc(size))
    recorder.read_settings()
    recorder.read_stats()
    recorder.take_snapshot()
    recorder.measure_snapshot()
    layout = published(recorder).layout
    gpu.cuda_malloc(others)
    for size in taken_later:
        if gpu.mem_get_info()[0] > size + 40 * MIB:
            allocator.malloc(size)
    recorder.read_stats()

    device, free = published(recorder), gpu.mem_get_info()[0]
    stats = allocator.stats
    cached = stats.reserved_bytes.current - stats.allocated_bytes.current
    assert layout is not None
    assert device.layout is not None
    assert layout.headroom_bytes is not None
    assert layout.headroom_flush_bytes is not None
    assert device.layout.headroom_bytes is not None
    assert device.layout.headroom_flush_bytes is not None
    assert free == device.driver_free_bytes
    assert device.layout.headroom_bytes <= layout.headroom_bytes
    assert device.layout.headroom_flush_bytes <= min(layout.headroom_flush_bytes, free + cached)


def test_a_memory_fraction_limits_what_is_published() -> None:
    """The limit of a memory fraction is published while there is one, and caps the headroom."""
    allocator = DeviceCachingAllocator(SimulatedGpu(1024 * MIB))
    recorder = Recorder(SimulatedBackend([allocator]))
    allocator.malloc(100 * MIB)
    recorder.read_settings()
    recorder.read_stats()
    recorder.take_snapshot()
    recorder.measure_snapshot()
    assert published(recorder).limit_bytes is None

    allocator.set_memory_fraction(0.25)
    recorder.read_stats()

    device = published(recorder)
    assert device.layout is not None
    assert (device.limit_bytes, device.layout.headroom_flush_bytes) == (256 * MIB, 156 * MIB)

    allocator.set_memory_fraction(1)
    recorder.read_stats()
    assert published(recorder).limit_bytes is None


@given(sizes, st.booleans())
def test_without_a_change_the_headroom_is_that_of_the_snapshot(
    taken: list[int], expandable: bool
) -> None:
    """Statistics read after a snapshot of the same state leave the headroom as it is."""
    gpu = SimulatedGpu(1024 * MIB, context_bytes=0)
    config = AllocatorConfig(expandable_segments=expandable)
    allocator = DeviceCachingAllocator(gpu, 0, config)
    recorder = Recorder(SimulatedBackend([allocator]))
    for number, size in enumerate(taken):
        if gpu.mem_get_info()[0] > size + 40 * MIB:
            block = allocator.malloc(size)
            if number % 2:
                allocator.free(block)
    recorder.read_settings()
    recorder.read_stats()
    recorder.take_snapshot()
    recorder.measure_snapshot()
    layout = published(recorder).layout
    recorder.read_stats()

    assert layout is not None
    assert layout == published(recorder).layout
