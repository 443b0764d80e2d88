"""A driver that answers as the one in the recording did.

What the recorded program did, without what the allocator did about it.

Runs the steps of a program on a simulated allocator, and watches it.

A recorded program under settings of our choice, on a card of our choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from torchmem.allocator.fragmentation import measure
from torchmem.allocator.oom_cause import (
    OomFacts,
    classify,
    fragmentation_detail,
    largest_free_blocks,
)
from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import DEFAULT_POOL
from torchmem.recording.recording import Event, PoolId
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block
from torchmem.simulator.card import CardUse, SimulatedCard
from torchmem.simulator.errors import OutOfMemoryDetails, OutOfMemoryError
from torchmem.simulator.snapshot import AWAITED_STREAM
from torchmem.whatif.rebuild import Before
from torchmem.whatif.result import FailedRequest, ReplayResult, Start, TimelinePoint

ENDLESS_BYTES = 1 << 40
"""More than any card has: stands for one of unknown size."""
NOBODYS_ADDRESS = 1 << 47
"""User addresses of Linux end here, so that no recorded address is met."""
GIVEN = frozenset({"segment_alloc", "segment_map"})
TAKEN = frozenset({"segment_free", "segment_unmap"})


class _EndlessUse(CardUse):
    """Counts bytes and refuses none: whether there was room the recording knows."""

    def claim(self, size: int, capacity: int) -> bool:
        """Add `size` bytes."""
        return super().claim(size, capacity + self.total() + size)


class RecordedCard(SimulatedCard):
    """Gives the recorded addresses, and refuses where memory had to go back first.

    `total_bytes` only decides how long the address ranges of expandable segments are.
    `expected` are the driver's next events, up to the request at hand; `fails`: that request failed. Asked for anything
    else it gives an address of its own. `later` gives what is mapped from now on for the stream and pool at hand,
    `ranges` are the address ranges that are reserved already.
    """

    first_address = NOBODYS_ADDRESS

    def __init__(self, total_bytes: int = ENDLESS_BYTES) -> None:
        super().__init__(total_bytes, context_bytes=0, use=_EndlessUse())
        self.expected: deque[Event] = deque()
        self.fails = False
        self.driver_free: int | None = None
        self.later: Callable[[], Iterator[Event]] = lambda: iter(())
        self.ranges: list[range] = []

    def cuda_malloc(self, size: int) -> int | None:
        """The next recorded segment of this size; None where the recorded driver refused."""
        if self._refuses():
            return None
        event = self.expected[0] if self.expected else None
        if event is None or event.action != "segment_alloc" or event.size != size:
            return self._own_segment(size)
        self.expected.popleft()
        self.adopt(event.address, size)
        return event.address

    def mem_map(self, address: int, size: int) -> bool:
        """Whether the recorded driver gave memory now."""
        if self._refuses():
            return False
        if (
            self.expected
            and self.expected[0].action == "segment_map"
            and self.expected[0].size == size
        ):
            self.expected.popleft()
        return super().mem_map(address, size)

    def reserve_addresses(self, size: int) -> int:
        """Where memory is mapped now; if it is not, where it is later, in no address range so far."""
        now = (event.address for event in self.expected if event.action == "segment_map")
        outside = (
            event.address
            for event in self.later()
            if not any(event.address in known for known in self.ranges)
        )
        address = next(now, None) or next(outside, None)
        if address is None:
            address = super().reserve_addresses(size)
        self.ranges.append(range(address, address + size))
        return address

    def cuda_free(self, address: int) -> None:
        """Take the segment back, and wait for it no longer."""
        super().cuda_free(address)
        self._drop(lambda event: event.action == "segment_free" and event.address == address)

    def mem_unmap(self, address: int, size: int) -> None:
        """Take pages back, and wait for them no longer."""
        super().mem_unmap(address, size)
        self._drop(lambda event: event.action == "segment_unmap" and event.size == size)

    def mem_get_info(self) -> tuple[int, int]:
        """Free bytes as the failed request's event tells them."""
        free, total = super().mem_get_info()
        return (free if self.driver_free is None else self.driver_free), total

    def _own_segment(self, size: int) -> int:
        address = super().reserve_addresses(size)
        self.adopt(address, size)
        return address

    def _refuses(self) -> bool:
        return self.expected[0].action in TAKEN if self.expected else self.fails

    def _drop(self, matches: Callable[[Event], bool]) -> None:
        found = next((event for event in self.expected if matches(event)), None)
        if found is not None:
            self.expected.remove(found)


class Act(IntEnum):
    """What a program can do to an allocator.

    MALLOC: a request that was served. TRY: one that failed; if it is served now, the block goes back at once, because
    nobody knows for how long it would have been held. FREE: a block is given back. FREE_LATER, COMPLETE: likewise, in
    two parts, when other streams used the block. EMPTY_CACHE: `torch.cuda.empty_cache()`. RELEASE_POOL: the last user
    of a private pool is gone. EMPTY_POOL: its cache goes back.
    """

    MALLOC = 0
    TRY = 1
    FREE = 2
    FREE_LATER = 3
    COMPLETE = 4
    EMPTY_CACHE = 5
    RELEASE_POOL = 6
    EMPTY_POOL = 7


Step = tuple[Act, int, int, int, int, PoolId]
"""Act, number of its event, recorded address, requested bytes, stream, pool; a plain tuple, as there are millions."""


@dataclass(frozen=True, slots=True)
class Program:
    """The steps in order, and the private pools that they use."""

    steps: list[Step]
    pools: frozenset[PoolId]


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
    timeline: list[TimelinePoint] = field(default_factory=list)
    oom: FailedRequest | None = None
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
        self.peak_reserved, self.peak_allocated = (
            max(self.peak_reserved, reserved),
            max(self.peak_allocated, allocated),
        )
        self.timeline.append(
            TimelinePoint(number, reserved, allocated, self.allocator.stranded_bytes())
        )
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
            self._failed(number, size, stream, error.details)
            raise EndedError from None
        if self.allocator.stats.reserved_bytes.peak > self._grown:
            self.sample(number)

    def _try(self, step: Step) -> None:
        _, number, _, size, stream, self.pool = step
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfMemoryError as error:
            self._failed(number, size, stream, error.details)
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

    def _failed(self, number: int, size: int, stream: int, report: OutOfMemoryDetails) -> None:
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
        blocks = largest_free_blocks(segments, report.device, report.requested, stream)
        kind = fragmentation_detail(facts, blocks) if cause == "fragmentation" else None
        allocated = stats.allocated_bytes.current
        self.oom = FailedRequest(
            number, size, reserved, allocated, layout.stranded_bytes, cause, kind
        )


@dataclass(frozen=True, slots=True)
class Replayer:
    """Replays one program from the blocks that were alive `before` it.

    `card_bytes`: what the allocator can get; None for a card without end. `total_bytes`: all memory of the card, of
    which a memory fraction is a part; None if it is not known, and then it is `card_bytes`.
    """

    program: Program
    before: Before
    events: int
    card_bytes: int | None
    total_bytes: int | None
    oldest_segment_first: bool
    on_sample: Callable[[int], None]

    def replay(self, name: str, conf: str, config: AllocatorConfig) -> ReplayResult:
        """What this setting would have done."""
        player = Player(
            self._allocator(config), self.card_bytes, self.events, on_sample=self.on_sample
        )
        player.use_pools(sorted(self.program.pools | {segment["segment_pool_id"] for segment in self.before.segments}
                                - {DEFAULT_POOL}))  # fmt: skip
        start: Start = "packed" if self.before.segments else "empty"
        try:
            self._pack(player)
        except EndedError:
            return outcome(name, conf, start, player, 0)
        player.start_counting()
        return outcome(name, conf, start, player, player.play(self.program))

    def _allocator(self, config: AllocatorConfig) -> DeviceCachingAllocator:
        obtainable = self.card_bytes or ENDLESS_BYTES
        total = max(obtainable, self.total_bytes or 0) if self.card_bytes else obtainable
        card = SimulatedCard(total, context_bytes=total - obtainable)
        allocator = DeviceCachingAllocator(
            card, config=config, oldest_segment_first=self.oldest_segment_first
        )
        fraction = config.per_process_memory_fraction
        if fraction < 1:
            allocator.set_memory_limit(int(fraction * total))
        elif config.garbage_collection_threshold:
            # The garbage collection needs a limit: here the whole of what the allocator can get.
            allocator.set_memory_limit(self.card_bytes)
        return allocator

    def _pack(self, player: Player) -> None:
        """Request what was alive, in the order of addresses; raises EndedError when the card is too small for it."""
        for segment in self.before.segments:
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    continue
                pool, stream = segment["segment_pool_id"], segment["stream"]
                address, size = block["address"], block["requested_size"]
                player.do((Act.MALLOC, 0, address, size, stream, pool))
                if block["state"] != "active_allocated":
                    player.do((Act.FREE_LATER, 0, address, size, stream, pool))


def outcome(name: str, conf: str, start: Start, player: Player, replayed: int) -> ReplayResult:
    """What a player saw."""
    stats = player.allocator.stats
    worst = max(player.timeline, key=lambda moment: moment.stranded, default=None)
    return ReplayResult(
        name=name,
        conf=conf,
        start=start,
        peak_reserved=player.peak_reserved,
        peak_allocated=player.peak_allocated,
        worst_stranded=worst.stranded if worst else 0,
        worst_event=worst.event if worst else None,
        retries=stats.num_alloc_retries,
        ooms=stats.num_ooms,
        oom=player.oom,
        replayed_events=replayed,
        device_allocs=stats.num_device_alloc,
        device_frees=stats.num_device_free,
        syncs=stats.num_sync_all_streams,
        timeline=tuple(player.timeline),
    )
