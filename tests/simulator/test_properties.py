"""Properties of any program of allocations, frees and releases on a GPU that is too small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocator_programs import SETTINGS, Programmer, Simulated

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.headroom import AvailableMemory
from torchmem.allocator.sizes import MIB, SMALL_SIZE, round_size
from torchmem.allocator.snapshot import BlockInfo, SegmentInfo
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import SimulatedGpu

GPU_BYTES = 70 * MIB
CONTEXT_BYTES = 10 * MIB

sizes = st.one_of(
    st.integers(1, 30).map(lambda count: count * MIB),
    st.integers(0, 12 * MIB),
    st.integers(0, 2 * MIB),
)
mallocs = st.tuples(st.just("malloc"), sizes, st.sampled_from([0, 0, 0, 7]))
frees = st.tuples(st.just("free"), st.integers(0, 1000), st.just(0))
flushes = st.tuples(st.just("empty_cache"), st.just(0), st.just(0))
actions = st.sampled_from([mallocs] * 10 + [frees] * 8 + [flushes]).flatmap(lambda action: action)
programs = st.lists(actions, max_size=80) | st.lists(actions, min_size=30, max_size=80)


def play(
    program: list[tuple[str, int, int]],
) -> Iterator[tuple[DeviceCachingAllocator, list[Block]]]:
    """Run a program on a new GPU; yield the allocator and the live blocks after each step."""
    allocator = DeviceCachingAllocator(SimulatedGpu(GPU_BYTES, CONTEXT_BYTES))
    live: list[Block] = []
    for action, number, stream in program:
        if action == "empty_cache":
            allocator.empty_cache()
        elif action == "malloc":
            with suppress(OutOfMemoryError):
                live.append(allocator.malloc(number, stream))
        elif live:
            allocator.free(live.pop(number % len(live)))
        yield allocator, live


def final(program: list[tuple[str, int, int]]) -> tuple[DeviceCachingAllocator, list[Block]]:
    """Return the allocator and the live blocks at the end of a program."""
    *_, last = [
        (DeviceCachingAllocator(SimulatedGpu(GPU_BYTES, CONTEXT_BYTES)), list[Block]()),
        *play(program),
    ]
    return last


def free_blocks(segments: list[SegmentInfo], pool: str) -> list[tuple[SegmentInfo, BlockInfo]]:
    """Return the free blocks of one pool with their segments."""
    return [
        (segment, block)
        for segment in segments
        if segment["segment_type"] == pool
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]


@given(programs)
def test_segments_are_filled_by_their_blocks(program: list[tuple[str, int, int]]) -> None:
    """Blocks fill their segment, neighbors are never both free, and segments do not overlap."""
    for allocator, _ in play(program):
        segments = allocator.memory_snapshot()
        for segment in segments:
            blocks = segment["blocks"]
            assert segment["total_size"] == sum(block["size"] for block in blocks)
            assert segment["address"] == blocks[0]["address"]
            for left, right in pairwise(blocks):
                assert left["address"] + left["size"] == right["address"]
                assert "active_allocated" in (left["state"], right["state"])
        for low, high in pairwise(segments):
            assert low["address"] + low["total_size"] <= high["address"]


@given(programs)
def test_large_free_blocks_exceed_1_mib(program: list[tuple[str, int, int]]) -> None:
    """No free block of the large pool is 1 MiB or less."""
    allocator, _ = final(program)
    assert all(
        block["size"] > SMALL_SIZE for _, block in free_blocks(allocator.memory_snapshot(), "large")
    )


@given(programs)
def test_statistics_are_consistent(program: list[tuple[str, int, int]]) -> None:
    """Current is increases minus decreases, from 0 to the peak, and the pools add up."""
    for allocator, _ in play(program):
        nested = allocator.memory_stats_as_nested_dict()
        for pools in (
            value for value in nested.values() if isinstance(value, dict) and "all" in value
        ):
            for stat in pools.values():
                assert stat["current"] == stat["allocated"] - stat["freed"]
                assert 0 <= stat["current"] <= stat["peak"]
            for name in ("current", "allocated", "freed"):
                assert pools["all"][name] == pools["small_pool"][name] + pools["large_pool"][name]


@given(programs)
def test_statistics_agree_with_the_snapshot(program: list[tuple[str, int, int]]) -> None:
    """Every current value equals a count over the snapshot, for both pools."""
    for allocator, live in play(program):
        segments, nested = allocator.memory_snapshot(), allocator.memory_stats_as_nested_dict()
        for pool in ("small", "large"):
            mine = [segment for segment in segments if segment["segment_type"] == pool]
            used = [
                block
                for segment in mine
                for block in segment["blocks"]
                if block["state"] == "active_allocated"
            ]
            split = [
                block
                for segment, block in free_blocks(segments, pool)
                if len(segment["blocks"]) > 1
            ]
            expected = {
                "segment": len(mine),
                "reserved_bytes": sum(segment["total_size"] for segment in mine),
                "allocation": len(used),
                "active": len(used),
                "allocated_bytes": sum(block["size"] for block in used),
                "active_bytes": sum(segment["active_size"] for segment in mine),
                "requested_bytes": sum(block["requested_size"] for block in used),
                "inactive_split": len(split),
                "inactive_split_bytes": sum(block["size"] for block in split),
            }
            assert {name: nested[name][f"{pool}_pool"]["current"] for name in expected} == expected
        assert len(live) == nested["allocation"]["all"]["current"]


@given(programs)
def test_the_gpu_has_what_is_reserved(program: list[tuple[str, int, int]]) -> None:
    """Allocated ≤ reserved ≤ GPU, and driver calls account for segments and free bytes."""
    for allocator, _ in play(program):
        nested = allocator.memory_stats_as_nested_dict()
        reserved = nested["reserved_bytes"]["all"]["current"]
        assert (
            nested["allocated_bytes"]["all"]["current"]
            <= nested["active_bytes"]["all"]["current"]
            <= reserved
        )
        assert allocator.gpu.mem_get_info()[0] == GPU_BYTES - CONTEXT_BYTES - reserved
        assert (
            nested["segment"]["all"]["current"]
            == nested["num_device_alloc"] - nested["num_device_free"]
        )
        assert nested["num_ooms"] <= nested["num_alloc_retries"] <= nested["num_sync_all_streams"]


@given(programs, sizes, st.sampled_from([0, 7]))
def test_best_fit_equals_a_search_of_the_snapshot(program: Any, size: int, stream: int) -> None:
    """A request gets the smallest, then lowest, free block that fits, without a driver call."""
    allocator, _ = final(program)
    needed, segments = round_size(size), allocator.memory_snapshot()
    pool = "small" if needed <= SMALL_SIZE else "large"
    fits = sorted(
        (block["size"], block["address"])
        for segment, block in free_blocks(segments, pool)
        if segment["stream"] == stream and block["size"] >= needed
    )
    before = allocator.memory_stats_as_nested_dict()["num_device_alloc"]
    try:
        block = allocator.malloc(size, stream)
    except OutOfMemoryError:
        assert not fits
        return
    called = allocator.memory_stats_as_nested_dict()["num_device_alloc"] - before
    assert called == (0 if fits else 1)
    assert not fits or block.address == fits[0][1]


@given(programs)
def test_headroom_is_exact(program: list[tuple[str, int, int]]) -> None:
    """The computed headroom can be allocated, 512 bytes more cannot, with and without flush."""
    for flush in (True, False):
        for extra in (0, 512):
            allocator, _ = final(program)
            reserved = allocator.memory_stats_as_nested_dict()["reserved_bytes"]["all"]["current"]
            layout = measure(
                allocator.memory_snapshot(),
                0,
                0.0,
                AvailableMemory(allocator.gpu.mem_get_info()[0], reserved),
            )
            headroom = layout.headroom_flush_bytes if flush else layout.headroom_bytes
            assert headroom is not None
            assert layout.segments is not None
            retries = allocator.memory_stats_as_nested_dict()["num_alloc_retries"]
            stream = 0 if not layout.segments.total or has_stream_0(allocator) else 7
            if headroom + extra:
                assert (extra == 0) == succeeds(
                    allocator, headroom + extra, stream, retries, flush=flush
                )


def has_stream_0(allocator: DeviceCachingAllocator) -> bool:
    """Return whether the default stream has memory; otherwise the other one has the headroom."""
    return any(segment["stream"] == 0 for segment in allocator.memory_snapshot())


def succeeds(
    allocator: DeviceCachingAllocator, size: int, stream: int, retries: int, *, flush: bool
) -> bool:
    """Return whether an allocation succeeds, without a retry unless `flush`."""
    try:
        allocator.malloc(size, stream)
    except OutOfMemoryError:
        return False
    return flush or allocator.memory_stats_as_nested_dict()["num_alloc_retries"] == retries


@given(programs)
def test_freeing_everything_empties_the_gpu(program: list[tuple[str, int, int]]) -> None:
    """After all frees and a cache release, nothing is reserved, allocated or split."""
    allocator, live = final(program)
    for block in live:
        allocator.free(block)
    assert all(len(segment["blocks"]) == 1 for segment in allocator.memory_snapshot())
    allocator.empty_cache()
    nested = allocator.memory_stats_as_nested_dict()
    assert allocator.memory_snapshot() == []
    assert {
        value["all"]["current"]
        for value in nested.values()
        if isinstance(value, dict) and "all" in value
    } == {0}
    assert allocator.gpu.mem_get_info()[0] == GPU_BYTES - CONTEXT_BYTES


@given(programs)
def test_the_same_program_gives_the_same_memory(program: list[tuple[str, int, int]]) -> None:
    """Addresses, layout and statistics depend on the program alone."""
    (first, _), (second, _) = final(program), final(program)
    assert first.memory_snapshot() == second.memory_snapshot()
    assert first.memory_stats_as_nested_dict() == second.memory_stats_as_nested_dict()


@settings(deadline=None)
@given(st.sampled_from(sorted(SETTINGS)), st.integers(0, 1 << 32), st.integers(1, 150))
def test_stranded_bytes_are_those_of_the_whole_state(name: str, seed: int, length: int) -> None:
    """The number that each operation updates equals a count over the snapshot, in every mode."""
    simulated, programmer = Simulated(SETTINGS[name]), Programmer(SETTINGS[name], Random(seed))
    for _ in range(length):
        operation = programmer.next()
        programmer.learn(operation, simulated.run(operation))
        assert stranded(simulated.allocator) == simulated.allocator.stats.stranded_bytes
    restored = DeviceCachingAllocator(
        SimulatedGpu(SETTINGS[name].gpu), config=simulated.allocator.config
    )
    restored.restore(simulated.snapshot())
    assert stranded(restored) == restored.stats.stranded_bytes


def stranded(allocator: DeviceCachingAllocator) -> int:
    """Count the stranded bytes of a snapshot."""
    return measure(allocator.memory_snapshot(), 0, 0.0, config=allocator.config).stranded_bytes


def test_the_programs_reach_retries_and_ooms() -> None:
    """At least one in ten of the programs retries with success, and one in ten fails."""
    succeeded, refused = [], []

    @settings(derandomize=True, max_examples=100)
    @given(programs)
    def look(program: list[tuple[str, int, int]]) -> None:
        nested = final(program)[0].memory_stats_as_nested_dict()
        succeeded.append(nested["num_alloc_retries"] > nested["num_ooms"])
        refused.append(nested["num_ooms"] > 0)

    look()
    assert sum(succeeded) >= 10
    assert sum(refused) >= 10
