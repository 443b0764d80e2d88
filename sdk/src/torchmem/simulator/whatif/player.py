"""Runs the steps of a program on a simulated allocator, and watches it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from torchmem.core.fragmentation import measure
from torchmem.core.oom import OomFacts, classify, detail, free_blocks
from torchmem.core.snapshot import DEFAULT_POOL
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.errors import OomReport, OutOfMemoryError
from torchmem.simulator.recording.trace import PoolId
from torchmem.simulator.restore import AWAITED_STREAM
from torchmem.simulator.whatif.program import Program, Step
from torchmem.simulator.whatif.result import Moment, Oom

SAMPLES = 400
"""Moments of a timeline that are spread evenly; those at new peaks come on top."""
GROWTH = 1.02
"""A new peak is worth a moment of its own from this factor on."""


class EndedError(Exception):
    """A request failed that succeeds in the recording: nobody knows how the program would go on."""


@dataclass(slots=True, eq=False)
class Player:
    """One allocator under one program.

    `blocks` are in use or wait for other streams, by the address that they have in the recording. `limit`: what the
    allocator can get at most in bytes, for the cause of an OOM; None when nobody knows.
    """

    allocator: DeviceCachingAllocator
    limit: int | None
    events: int
    blocks: dict[int, Block] = field(default_factory=dict)
    timeline: list[Moment] = field(default_factory=list)
    oom: Oom | None = None
    peak_reserved: int = 0
    peak_allocated: int = 0
    on_sample: Callable[[int], None] = lambda _: None
    pool: PoolId = DEFAULT_POOL
    _grown: float = 0
    _sample_at: int = 0
    _acts: tuple[Callable[[Step], None], ...] = ()

    def __post_init__(self) -> None:
        self._acts = (
            self._malloc, self._try, self._free, self._free_later,
            self._complete, self._empty_cache, self._release_pool, self._empty_pool,
        )  # fmt: skip
        self.allocator.card.hold_events(True)

    def use_pools(self, pools: Iterable[PoolId]) -> None:
        """Make these private pools: a request goes to the one that it names."""
        for pool in pools:
            self.allocator.begin_allocate_to_pool(pool, partial(self._is_pool, pool))

    def start_counting(self) -> None:
        """What was done up to here prepares the memory, and counts for nothing."""
        self.timeline.clear()
        self.peak_reserved = self.peak_allocated = 0
        self._grown = self._sample_at = 0
        self.allocator.reset_peak_memory_stats()
        self.allocator.reset_accumulated_memory_stats()

    def play(self, program: Program) -> int:
        """All steps, or those before a request failed; number of events that are done then."""
        act = self._acts
        try:
            for step in program.steps:
                act[step[0]](step)
                if step[1] >= self._sample_at:
                    self.sample(step[1])
        except EndedError:
            self.sample(step[1])
            return step[1]
        self.sample(self.events)
        return self.events

    def do(self, step: Step) -> None:
        """One step; raises EndedError when a request fails that succeeds in the recording."""
        self._acts[step[0]](step)
        if step[1] >= self._sample_at:
            self.sample(step[1])

    def sample(self, number: int) -> None:
        """Add a moment to the timeline."""
        stats = self.allocator.stats
        reserved, allocated = stats.reserved_bytes.peak, stats.allocated_bytes.peak
        self.peak_reserved, self.peak_allocated = max(self.peak_reserved, reserved), max(self.peak_allocated, allocated)
        self.timeline.append(Moment(number, reserved, allocated, self.allocator.stranded_bytes()))
        self.allocator.reset_peak_memory_stats()
        self._grown = self.peak_reserved * GROWTH
        self._sample_at = number + max(1, self.events // SAMPLES)
        self.on_sample(number)

    def _is_pool(self, pool: PoolId, _: int) -> bool:
        return pool == self.pool

    def _malloc(self, step: Step) -> None:
        _, number, address, size, stream, self.pool = step
        try:
            self.blocks[address] = self.allocator.malloc(size, stream)
        except OutOfMemoryError as error:
            self._failed(number, size, stream, error.report)
            raise EndedError from None
        if self.allocator.stats.reserved_bytes.peak > self._grown:
            self.sample(number)

    def _try(self, step: Step) -> None:
        _, number, _, size, stream, self.pool = step
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemoryError as error:
            self._failed(number, size, stream, error.report)
        else:
            self.allocator.free(block)

    def _free(self, step: Step) -> None:
        block = self.blocks.pop(step[2], None)
        if block is not None and block.allocated:
            self.allocator.free(block)

    def _free_later(self, step: Step) -> None:
        block = self.blocks.get(step[2])
        if block is not None and block.allocated:
            self.allocator.record_stream(block, AWAITED_STREAM)
            self.allocator.free(block)

    def _complete(self, step: Step) -> None:
        block = self.blocks.pop(step[2], None)
        if block is not None:
            self.allocator.complete_events(block)

    def _empty_cache(self, _: Step) -> None:
        self.allocator.empty_cache()

    def _release_pool(self, step: Step) -> None:
        self.allocator.release_pool(step[5])

    def _empty_pool(self, step: Step) -> None:
        self.allocator.empty_cache(step[5])

    def _failed(self, number: int, size: int, stream: int, report: OomReport) -> None:
        self.sample(number)
        if self.oom is not None:
            return
        stats, segments = self.allocator.stats, self.allocator.memory_snapshot()
        layout = measure(segments, report.device, 0.0)
        reserved = stats.reserved_bytes.current
        facts = OomFacts(
            requested=report.requested,
            limit=report.allowed or self.limit or reserved + report.free,
            driver_free=report.free,
            cached_free=layout.releasable_bytes + layout.stranded_bytes,
            reserved=reserved,
            total=reserved + report.free,
            private_free=layout.private_free_bytes,
            large_segment=self.allocator.config.large_segment_size,
        )
        cause = classify(facts)
        blocks = free_blocks(segments, report.device, report.requested, stream)
        kind = detail(facts, blocks) if cause == "fragmentation" else None
        allocated = stats.allocated_bytes.current
        self.oom = Oom(number, size, reserved, allocated, layout.stranded_bytes, cause, kind)
