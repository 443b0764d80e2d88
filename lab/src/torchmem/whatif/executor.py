"""Executes a program on one simulated allocator, instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.oom_cause import OomEvidence, largest_free_blocks
from torchmem.allocator.snapshot import DEFAULT_POOL, PoolId
from torchmem.explain.verdict import Circumstances, judge
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.errors import OutOfMemoryDetails, OutOfMemoryError
from torchmem.simulator.snapshot import AWAITED_STREAM
from torchmem.whatif.program import Instruction, Program
from torchmem.whatif.result import FailedRequest, ReplayResult, Start, TimelinePoint

SAMPLES = 400
"""Evenly spaced points of a timeline; points at new peaks are added to them."""
PEAK_GROWTH = 1.02
"""A new peak gets a point of its own if it is larger by this factor."""


class ReplayEndedError(Exception):
    """A request failed that succeeded in the recording, so how the program continues is unknown."""


@dataclass(slots=True, eq=False)
class Executor:
    """Executes a program on one allocator and records the timeline.

    `blocks` are the blocks that are in use or wait for other streams, by their recorded address.
    `limit` is what the allocator can get at most in bytes, for the cause of an OOM, or None.
    """

    allocator: DeviceCachingAllocator
    limit: int | None
    events: int
    blocks: dict[int, Block] = field(default_factory=dict)
    timeline: list[TimelinePoint] = field(default_factory=list)
    oom: FailedRequest | None = None
    peak_reserved: int = 0
    peak_allocated: int = 0
    worst_stranded: int = 0
    worst_event: int | None = None
    on_sample: Callable[[int], None] = lambda _: None
    pool: PoolId = DEFAULT_POOL
    _sample_above: float = 0
    _sample_at: int = 0
    _stranded: int = 0
    _handlers: tuple[Callable[[Instruction], None], ...] = ()

    def __post_init__(self) -> None:
        self._handlers = (  # in the order of `Operation`
            self._malloc,
            self._try_malloc,
            self._free,
            self._free_later,
            self._complete,
            self._empty_cache,
            self._release_pool,
            self._empty_pool,
        )
        # A block that waits for a stream becomes free where the recording says so, not at the next
        # request.
        self.allocator.gpu.hold_events(True)

    def use_pools(self, pools: Iterable[PoolId]) -> None:
        """Create private pools; an instruction's request goes to the pool that it names."""
        for pool in pools:
            self.allocator.begin_allocate_to_pool(pool, partial(self._is_pool, pool))

    def start_counting(self) -> None:
        """Discard all counts: everything so far only prepared the memory."""
        self.timeline.clear()
        self.peak_reserved = self.peak_allocated = 0
        self.worst_stranded, self.worst_event = 0, None
        self._sample_above = self._sample_at = self._stranded = 0
        self.allocator.reset_peak_memory_stats()
        self.allocator.reset_accumulated_memory_stats()

    def run(self, program: Program) -> int:
        """Execute a program, up to a request that fails; return the number of replayed events."""
        handlers, stats = self._handlers, self.allocator.stats
        split = stats.inactive_split_bytes
        small, large = split.small_pool, split.large_pool
        try:
            for instruction in program:
                handlers[instruction[0]](instruction)
                # As `stats.stranded_bytes`, without its calls: this is the hottest loop.
                if small.current + large.current + stats.stranded_offset > self._stranded:
                    self._count_stranded(instruction[1])
                if instruction[1] >= self._sample_at:
                    self.sample(instruction[1])
        except ReplayEndedError:
            self.sample(instruction[1])
            return instruction[1]
        self.sample(self.events)
        return self.events

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction.

        Raises:
            ReplayEndedError: a request failed that succeeded in the recording.
        """
        self._handlers[instruction[0]](instruction)
        if self.allocator.stats.stranded_bytes > self._stranded:
            self._count_stranded(instruction[1])
        if instruction[1] >= self._sample_at:
            self.sample(instruction[1])

    def sample(self, number: int) -> None:
        """Add a point to the timeline."""
        stats = self.allocator.stats
        reserved, allocated = stats.reserved_bytes.peak, stats.allocated_bytes.peak
        self.peak_reserved = max(self.peak_reserved, reserved)
        self.peak_allocated = max(self.peak_allocated, allocated)
        self._count_stranded(number)
        self.timeline.append(TimelinePoint(number, reserved, allocated, self._stranded))
        self._stranded = stats.stranded_bytes
        self.allocator.reset_peak_memory_stats()
        self._sample_above = self.peak_reserved * PEAK_GROWTH
        self._sample_at = number + max(1, self.events // SAMPLES)
        self.on_sample(number)

    def result(self, name: str, conf: str, start: Start, replayed: int) -> ReplayResult:
        """Return what was recorded; `replayed` is the number of replayed events."""
        stats = self.allocator.stats
        return ReplayResult(
            name=name,
            conf=conf,
            start=start,
            peak_reserved=self.peak_reserved,
            peak_allocated=self.peak_allocated,
            worst_stranded=self.worst_stranded,
            worst_event=self.worst_event,
            retries=stats.num_alloc_retries,
            ooms=stats.num_ooms,
            oom=self.oom,
            replayed_events=replayed,
            device_allocs=stats.num_device_alloc,
            device_frees=stats.num_device_free,
            syncs=stats.num_sync_all_streams,
            timeline=tuple(self.timeline),
        )

    def _count_stranded(self, number: int) -> None:
        stranded = self.allocator.stats.stranded_bytes
        self._stranded = max(self._stranded, stranded)
        if stranded > self.worst_stranded:
            self.worst_stranded, self.worst_event = stranded, number

    def _is_pool(self, pool: PoolId, _: int) -> bool:
        return pool == self.pool

    def _malloc(self, instruction: Instruction) -> None:
        _, number, address, size, stream, self.pool = instruction
        try:
            self.blocks[address] = self.allocator.malloc(size, stream)
        except OutOfMemoryError as error:
            self._record_oom(number, size, stream, error.details)
            raise ReplayEndedError from None
        if self.allocator.stats.reserved_bytes.peak > self._sample_above:
            self.sample(number)

    def _try_malloc(self, instruction: Instruction) -> None:
        _, number, _, size, stream, self.pool = instruction
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemoryError as error:
            self._record_oom(number, size, stream, error.details)
        else:
            self.allocator.free(block)

    def _free(self, instruction: Instruction) -> None:
        block = self.blocks.pop(instruction[2], None)
        if block is not None and block.allocated:
            self.allocator.free(block)

    def _free_later(self, instruction: Instruction) -> None:
        block = self.blocks.get(instruction[2])
        if block is not None and block.allocated:
            self.allocator.record_stream(block, AWAITED_STREAM)
            self.allocator.free(block)

    def _complete(self, instruction: Instruction) -> None:
        block = self.blocks.pop(instruction[2], None)
        if block is not None:
            self.allocator.complete_events(block)

    def _empty_cache(self, _: Instruction) -> None:
        self.allocator.empty_cache()

    def _release_pool(self, instruction: Instruction) -> None:
        self.allocator.release_pool(instruction[5])

    def _empty_pool(self, instruction: Instruction) -> None:
        self.allocator.empty_cache(instruction[5])

    def _record_oom(self, number: int, size: int, stream: int, details: OutOfMemoryDetails) -> None:
        self.sample(number)
        if self.oom is None:
            self.oom = self._failed_request(number, size, stream, details)

    def _failed_request(
        self, number: int, size: int, stream: int, details: OutOfMemoryDetails
    ) -> FailedRequest:
        """Return a request with its cause.

        What was missing is a whole segment, or what `throw_on_cudamalloc_oom` refused.
        """
        allocator, device = self.allocator, details.device
        reserved = allocator.stats.reserved_bytes.current
        segments = allocator.memory_snapshot()
        layout = measure(segments, device, 0.0)
        evidence = OomEvidence(
            requested=details.requested,
            limit=details.allowed or self.limit or reserved + details.free,
            driver_free=details.free,
            cached_free=layout.releasable_bytes + layout.stranded_bytes,
            reserved=reserved,
            total=reserved + details.free,
            private_free=layout.private_free_bytes,
            large_segment=allocator.config.large_segment_size,
        )
        free = largest_free_blocks(segments, device, details.requested, stream)
        verdict = judge(evidence, free, Circumstances(is_training=False))
        return FailedRequest(
            number,
            size,
            reserved,
            allocator.stats.allocated_bytes.current,
            layout.stranded_bytes,
            verdict.cause,
            verdict.detail,
        )
