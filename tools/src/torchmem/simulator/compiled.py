"""The replay of a program in C (c/replay.c), for long traces; built at first use.

It does exactly what `DeviceCachingAllocator` does, which is the reference, and starts from the
state of one. Without a C compiler, or with TORCHMEM_SIMULATOR=python, there is none.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from torchmem.allocator.settings import DEFAULT_CONFIG, DIVISION_ENTRIES
from torchmem.allocator.snapshot import DEFAULT_POOL, PoolId, SegmentInfo
from torchmem.phantom.build import shared_library
from torchmem.sample.errors import TorchmemError
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block, BlockOrder, BlockPool, ExpandableSegment
from torchmem.simulator.snapshot import AWAITED_STREAM, segment_infos

SOURCE = Path(__file__).resolve().parent / "c" / "replay.c"
VARIABLE = "TORCHMEM_SIMULATOR"
DONE, OOM, REJECTED, UNSUPPORTED, NO_MEMORY = range(5)
"""Why a replay stopped."""
NO_LIMIT = (1 << 64) - 1
ONLY_STREAM = 2
KNOWN_SETTINGS = frozenset(
    {
        "known",
        "expandable_segments",
        "max_split_size",
        "max_non_split_rounding_size",
        "large_segment_size",
        "roundup_power2_divisions",
        "throw_on_cudamalloc_oom",
        "garbage_collection_threshold",
        "per_process_memory_fraction",
    }
)
"""Fields of `AllocatorConfig` that replay.c implements."""
_ORDERS: tuple[BlockOrder, ...] = ("address", "segment", "block")


class UnsupportedError(Exception):
    """Only the Python modules can replay this."""


class _Settings(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("max_split_size", "max_non_split_rounding_size")),
        *((name, ctypes.c_uint64) for name in ("large_segment_size", "allowed")),
        *((name, ctypes.c_uint64) for name in ("gc_threshold_bytes", "rejection_bytes")),
        *((name, ctypes.c_uint64) for name in ("total_bytes", "used_bytes")),
        *((name, ctypes.c_uint64) for name in ("next_address", "next_counter")),
        *((name, ctypes.c_int64) for name in ("events", "stranded_offset")),
        ("divisions", ctypes.c_int64 * DIVISION_ENTRIES),
        *((name, ctypes.c_int32) for name in ("expandable_segments", "takes_best_fit")),
        *((name, ctypes.c_int32) for name in ("collects_garbage", "order", "samples", "pools")),
    )


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("address", "size", "requested_size")),
        *((name, ctypes.c_uint64) for name in ("registration_counter", "gc_count_base")),
        *((name, ctypes.c_uint64) for name in ("page_parts", "range", "page")),
        *((name, ctypes.c_int64) for name in ("stream", "prev", "next")),
        *((name, ctypes.c_int32) for name in ("pool", "allocated", "mapped", "waits")),
        ("is_free", ctypes.c_int32),
    )


class _Counts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("peak_reserved", "peak_allocated", "retries")),
        *((name, ctypes.c_uint64) for name in ("ooms", "device_allocs", "device_frees", "syncs")),
        *((name, ctypes.c_uint64) for name in ("reserved", "allocated", "free_bytes")),
        ("requested", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("worst_stranded", "worst_event", "number")),
    )


@dataclass(frozen=True, slots=True)
class ProgramColumns:
    """A program: per instruction its operation, event number, slot, bytes, stream and pool.

    A slot is a small number in place of the address by which the program knows a block.
    """

    operations: array[int]
    numbers: array[int]
    slots: array[int]
    sizes: array[int]
    streams: array[int]
    pools: array[int]


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled replay, or None if there is none here. It is built in about a second."""
    if os.environ.get(VARIABLE) == "python":
        return None
    try:
        path = shared_library("simulator", (SOURCE,), ("-O2", "-shared", "-fPIC"))
        loaded = ctypes.CDLL(str(path))
    except (TorchmemError, OSError):
        return None
    loaded.replay_new.restype = ctypes.c_void_p
    loaded.replay_blocks.restype = ctypes.c_size_t
    loaded.replay_counts.restype = ctypes.POINTER(_Counts)
    loaded.replay_points.restype = ctypes.POINTER(ctypes.c_int64)
    return loaded


class CompiledReplay:
    """One replay, from the current state of an allocator that has no counts yet.

    `blocks` are the blocks in use or waiting by slot, of `slots` slots. `pools` are the private
    pools in the order of their numbers in the columns. A timeline has about `samples` points.

    Raises:
        UnsupportedError: the state is none that the compiled replay knows.
        MemoryError: the memory of this process ran out, here and in the methods.
    """

    def __init__(  # noqa: PLR0913 - a state has these parts
        self,
        loaded: ctypes.CDLL,
        allocator: DeviceCachingAllocator,
        blocks: Mapping[int, Block],
        columns: ProgramColumns,
        pools: Sequence[PoolId],
        *,
        slots: int,
        events: int,
        samples: int,
    ) -> None:
        self._library = loaded
        self._device = allocator.device
        self._columns = columns
        self._place = 0
        state = _State(allocator, (DEFAULT_POOL, *pools), blocks)
        settings = _settings(allocator, 1 + len(pools), events, samples)
        self._pools, places = state.pools, state.blocks()
        self._handle = ctypes.c_void_p(
            loaded.replay_new(
                ctypes.byref(settings),
                (_Block * len(places))(*places),
                ctypes.c_size_t(len(places)),
                (ctypes.c_int64 * len(state.held))(*state.held),
                ctypes.c_size_t(len(state.held) // 2),
                ctypes.c_size_t(slots),
                *state.numbers(),
            )
        )
        if not self._handle:
            raise MemoryError

    def close(self) -> None:
        """Free the memory of the replay."""
        self._library.replay_free(self._handle)

    def run(self) -> int:
        """Execute instructions up to one that fails; return why it stopped.

        The next call continues behind that instruction.
        """
        columns, place = self._columns, ctypes.c_size_t()
        arrays = (columns.operations, columns.numbers, columns.slots, columns.sizes)
        reason: int = self._library.replay_run(
            self._handle,
            *(ctypes.c_void_p(each.buffer_info()[0]) for each in arrays),
            ctypes.c_void_p(columns.streams.buffer_info()[0]),
            ctypes.c_void_p(columns.pools.buffer_info()[0]),
            ctypes.c_size_t(self._place),
            ctypes.c_size_t(len(columns.operations)),
            ctypes.byref(place),
        )
        self._place = place.value + 1
        _check(reason)
        if reason == UNSUPPORTED:
            raise UnsupportedError
        return reason

    @property
    def failed(self) -> int:
        """The place of the instruction that failed."""
        return self._place - 1

    def sample(self, number: int) -> None:
        """Add a point to the timeline."""
        _check(self._library.replay_sample(self._handle, ctypes.c_int64(number)))

    def go_on(self, number: int) -> None:
        """End an instruction of event `number` that failed, but does not end the replay."""
        _check(self._library.replay_go_on(self._handle, ctypes.c_int64(number)))

    @property
    def counts(self) -> Any:
        """The counts, peaks and current sizes, as `Counts` in replay.c."""
        return self._library.replay_counts(self._handle).contents

    def timeline(self) -> list[tuple[int, int, int, int]]:
        """Return event number, reserved, allocated and stranded bytes of each point."""
        count = ctypes.c_size_t()
        found = self._library.replay_points(self._handle, ctypes.byref(count))
        numbers = iter(found[: 4 * count.value])
        return list(zip(numbers, numbers, numbers, numbers, strict=True))

    def memory_snapshot(self) -> list[SegmentInfo]:
        """Return the segments as `DeviceCachingAllocator.memory_snapshot` does."""
        states = ctypes.POINTER(_Block)()
        count = self._library.replay_blocks(self._handle, ctypes.byref(states))
        if not states:
            raise MemoryError
        try:
            blocks = [block for block in self._blocks(states[:count]) if block.mapped]
        finally:
            self._library.replay_forget(states)
        return segment_infos(blocks, self._device)

    def _blocks(self, states: Iterable[Any]) -> Iterator[Block]:
        """Yield the blocks as those of the reference, linked in their segments."""
        before: Block | None = None
        for state in states:
            pool = self._pools[state.pool]
            block = Block(state.stream, state.size, pool, state.address, bool(state.allocated))
            block.requested_size, block.mapped = state.requested_size, bool(state.mapped)
            block.event_count = state.waits
            if state.page:
                block.expandable_segment = ExpandableSegment(state.range, state.page)
            if state.prev >= 0:
                block.splice(before, None)
            before = block
            yield block


def _check(reason: int) -> None:
    if reason == NO_MEMORY:
        raise MemoryError


class _State:
    """The state of an allocator in the form of replay.c."""

    def __init__(
        self,
        allocator: DeviceCachingAllocator,
        pool_ids: Sequence[PoolId],
        slots: Mapping[int, Block],
    ) -> None:
        memory, events = allocator.memory, allocator.outstanding_events.cuda_events
        pools = memory.private_pools
        is_known = events.keys() <= {AWAITED_STREAM} and not pools.freeable
        if not is_known or pools.graph_pools.keys() != {*pool_ids[1:]}:
            raise UnsupportedError
        self._stats = allocator.stats
        self._private = [pools.graph_pools[pool] for pool in pool_ids[1:]]
        self.pools = [memory.small_blocks, memory.large_blocks]
        for private in self._private:
            self.pools += (private.small_blocks, private.large_blocks)
        waiting = list(events.get(AWAITED_STREAM, ()))
        used = [block for block in allocator.active_blocks if not block.event_count]
        self._used = (*waiting, *used)
        self._slots = slots
        self.held: list[int] = []

    def blocks(self) -> list[_Block]:
        """Return all blocks, those that wait in the order of their queue, and the streams.

        `held` then has the slots, each followed by the place of its block.
        """
        index = {id(pool): number for number, pool in enumerate(self.pools)}
        free = [block for pool in self.pools for block in _free_and_unmapped(pool)]
        blocks = [*self._used, *free]
        place = {id(block): number for number, block in enumerate(blocks)}
        for slot, block in self._slots.items():
            if id(block) in place:  # otherwise it was merged into another one
                self.held += slot, place[id(block)]
        states = [self._block(block, index, place) for block in blocks]
        for state in states[len(self._used) :]:
            state.is_free = 1
        streams = [
            _Block(pool=number, stream=stream, is_free=ONLY_STREAM, prev=-1, next=-1)
            for number, pool in enumerate(self.pools)
            for stream in pool.streams
        ]
        return [*states, *streams]

    def _block(self, block: Block, index: dict[int, int], place: dict[int, int]) -> _Block:
        segment = block.expandable_segment
        return _Block(
            address=block.address,
            size=block.size,
            requested_size=block.requested_size,
            registration_counter=block.registration_counter,
            gc_count_base=block.gc_count_base,
            page_parts=block.page_parts if not block.allocated and not block.event_count else 0,
            range=segment.address if segment else 0,
            page=segment.segment_size if segment else 0,
            stream=block.stream,
            prev=-1 if block.prev is None else place[id(block.prev)],
            next=-1 if block.next is None else place[id(block.next)],
            pool=index[id(block.pool)],
            allocated=block.allocated,
            mapped=block.mapped,
            waits=block.event_count,
        )

    def numbers(self) -> Iterator[ctypes.Array[Any]]:
        """Yield what `replay_new` gets after the slots."""
        stats, private = self._stats, self._private
        reserved = stats.reserved_bytes_by_private_pools
        for array_ in (stats.reserved_bytes, stats.allocated_bytes, stats.inactive_split_bytes):
            yield (ctypes.c_int64 * 2)(array_.small_pool.current, array_.large_pool.current)
        yield _numbers(pool.get_free_blocks_call_count for pool in self.pools)
        yield _numbers([1, *(pool.use_count for pool in private)])
        found = (reserved.get(pool.id) for pool in private)
        yield _numbers([0, *(stat.current if stat else 0 for stat in found)])


def _numbers(values: Iterable[int]) -> ctypes.Array[Any]:
    numbers = list(values)
    return (ctypes.c_uint64 * len(numbers))(*numbers)


def _free_and_unmapped(pool: BlockPool) -> Iterator[Block]:
    yield from pool
    for ranges in pool.unmapped.values():
        yield from ranges


def _settings(
    allocator: DeviceCachingAllocator, pools: int, events: int, samples: int
) -> _Settings:
    config, memory, gpu = allocator.config, allocator.memory, allocator.gpu
    unknown = (each.name for each in fields(config) if each.name not in KNOWN_SETTINGS)
    if any(getattr(config, name) != getattr(DEFAULT_CONFIG, name) for name in unknown):
        raise UnsupportedError
    allowed = memory.allowed_memory_maximum
    threshold, rejection = NO_LIMIT, NO_LIMIT
    if allowed is not None and memory.collects_garbage:
        threshold = int(config.garbage_collection_threshold * allowed)
    if config.throw_on_cudamalloc_oom:
        rejection = int(config.per_process_memory_fraction * gpu.total_bytes)
    unlimited = config.max_split_size is None
    return _Settings(
        max_split_size=NO_LIMIT if unlimited else config.max_split_size,
        max_non_split_rounding_size=config.max_non_split_rounding_size,
        large_segment_size=config.large_segment_size,
        allowed=NO_LIMIT if allowed is None else allowed,
        gc_threshold_bytes=threshold,
        rejection_bytes=rejection,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.use.total(),
        next_address=gpu.next_address,
        next_counter=next(copy(memory.counter)),
        events=events,
        stranded_offset=allocator.stats.stranded_offset,
        divisions=(ctypes.c_int64 * DIVISION_ENTRIES)(*config.roundup_power2_divisions),
        expandable_segments=config.expandable_segments,
        takes_best_fit=allocator.takes_best_fit,
        collects_garbage=memory.collects_garbage,
        order=_ORDERS.index(memory.order),
        samples=samples,
        pools=pools,
    )
