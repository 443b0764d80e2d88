"""Repeating a recording under its own settings, which also tells the program's doings from the allocator's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import SMALL_BUFFER, SMALL_SIZE
from torchmem.allocator.snapshot import DEFAULT_POOL
from torchmem.recording.recording import Event, PoolId, Recording
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.snapshot import range_key
from torchmem.whatif.rebuild import Case
from torchmem.whatif.replay import (
    ENDLESS_BYTES,
    GIVEN,
    TAKEN,
    Act,
    EndedError,
    Player,
    Program,
    RecordedCard,
    Step,
)


@dataclass(slots=True, eq=False)
class Repetition:
    """One replay of a recording on the recorded addresses, and the program that it found.

    `group` are the driver's events since the last step of the program, `completed` the addresses of the blocks whose
    wait ended meanwhile. `doubtful`: times that cache went back to the driver just before a request needed a segment,
    which count as `torch.cuda.empty_cache()`, but may have been the allocator's own as well.
    """

    recording: Recording
    config: AllocatorConfig
    card: RecordedCard
    player: Player
    card_bytes: int | None
    most_misses: int
    steps: list[Step] = field(default_factory=list)
    pools: set[PoolId] = field(default_factory=set)
    released: set[PoolId] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    group: list[Event] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    allocations: int = 0
    landed: int = 0
    first_miss: int | None = None
    doubtful: int = 0

    @property
    def program(self) -> Program:
        """What the recorded program did."""
        return Program(self.steps, frozenset(self.pools))

    def run(self) -> None:
        """Repeat the recording, or as much of it as `most_misses` allocations on another address allow."""
        given_back = -1
        events = self.recording.events
        for number, event in enumerate(events):
            action = event.action
            if action == "alloc":
                self._request(number, event, Act.MALLOC)
            elif action == "free_requested":
                self._end_group(number)
                following = events[number + 1] if number + 1 < len(events) else None
                is_whole = following is not None and (following.action, following.address) == (
                    "free_completed", event.address)  # fmt: skip
                given_back = event.address if is_whole else -1
                self._give_back(number, event, Act.FREE if is_whole else Act.FREE_LATER)
            elif action == "free_completed":
                if event.address != given_back:
                    self.completed.append(event.address)
                given_back = -1
            elif action == "oom":
                self._request(number, event, Act.TRY)
            elif action in GIVEN or action in TAKEN:
                self.group.append(event)
            if self.allocations - self.landed > self.most_misses:
                return
        self._end_group(len(events) - 1)
        self.player.sample(len(events))

    def _do(
        self, act: Act, number: int, event: Event | None = None, pool: PoolId = DEFAULT_POOL
    ) -> None:
        step = (act, number, 0, 0, 0, pool) if event is None else (
            act, number, event.address, event.size, event.stream, pool)  # fmt: skip
        self.steps.append(step)
        self.player.do(step)

    def _give_back(self, number: int, event: Event, act: Act) -> None:
        if act is Act.FREE_LATER:
            self.waiting.add(event.address)
        self._do(act, number, event)

    def _request(self, number: int, event: Event, act: Act) -> None:
        returned = [other for other in self.group if other.action in TAKEN]
        # Of blocks that waited, those that a flush waited for are free only after the search for a free block.
        flushed = act is Act.TRY or self._is_flush(returned)
        waits_on = not self.waiting <= set(self.completed)
        if waits_on or not flushed:
            self._complete_all(number)
        self.player.pool = event.pool
        if returned and self._is_empty_cache(event, returned, act, waits_on=waits_on):
            self._empty_cache(number, returned)
            last = max(index for index, other in enumerate(self.group) if other.action in TAKEN)
            del self.group[: last + 1]
        else:
            self._release_pools(number, returned)
        self._ask(number, event, act)
        self._complete_all(number)
        self.group.clear()

    def _is_flush(self, returned: list[Event]) -> bool:
        """Whether all that could go back did; the garbage collection and oversize rules take a part."""
        takes_parts = (
            self.config.max_split_size is not None or self.config.garbage_collection_threshold
        )
        size = sum(event.size for event in returned)
        return size > 0 and not (takes_parts and size < self.player.allocator.releasable_bytes())

    def _ask(self, number: int, event: Event, act: Act) -> None:
        self.card.expected, self.card.fails = deque(self.group), act is Act.TRY
        self.card.driver_free = event.device_free
        self.card.later = partial(self._mapped_later, number - len(self.group), event)
        if event.pool != DEFAULT_POOL:
            self.pools.add(event.pool)
        try:
            self._do(act, number, event, event.pool)
        except EndedError:
            block = None
        else:
            block = self.player.blocks.get(event.address)
        self.card.expected, self.card.fails, self.card.driver_free = deque(), False, None
        if act is Act.MALLOC:
            self.allocations += 1
            if block is not None and block.address == event.address:
                self.landed += 1
            elif self.first_miss is None:
                self.first_miss = number

    def _mapped_later(self, first: int, request: Event) -> Iterator[Event]:
        is_small = self.config.round_size(request.size) <= SMALL_SIZE
        for event in islice(self.recording.events, first, None):
            fits = event.action == "segment_map" and (event.size == SMALL_BUFFER) == is_small
            if fits and event.stream == request.stream and event.pool == request.pool:
                yield event

    def _is_empty_cache(
        self, event: Event, returned: list[Event], act: Act, *, waits_on: bool
    ) -> bool:
        """Whether it was the program that gave cache back before a request, not the allocator for its sake."""
        if act is Act.TRY or waits_on:
            return False  # it would have waited for all
        if self.group[-1].action in TAKEN:
            return True
        config, allocator = self.config, self.player.allocator
        if config.max_split_size is None and allocator.would_reuse(event.size, event.stream):
            return True
        if self.card_bytes is not None:
            wanted = sum(other.size for other in self.group if other.action in GIVEN)
            if allocator.stats.reserved_bytes.current + wanted > self.card_bytes:
                return False
        if config.max_split_size is not None or config.garbage_collection_threshold:
            return self._is_flush(returned)
        self.doubtful += self.card_bytes is None
        return True

    def _end_group(self, number: int) -> None:
        """What the driver gave or took without a request was the program's doing."""
        returned = [event for event in self.group if event.action in TAKEN]
        if returned:
            self._empty_cache(number, returned)
        self.group.clear()
        self._complete_all(number)

    def _empty_cache(self, number: int, returned: Iterable[Event]) -> None:
        self._release_pools(number, returned)
        pools = dict.fromkeys(event.pool for event in returned)
        self.card.expected = deque()
        if DEFAULT_POOL in pools:
            self._do(Act.EMPTY_CACHE, number)
            return
        for pool in pools:
            self._do(Act.EMPTY_POOL, number, pool=pool)

    def _release_pools(self, number: int, returned: Iterable[Event]) -> None:
        """Only a private pool without a user gives memory back."""
        for pool in dict.fromkeys(event.pool for event in returned):
            if pool != DEFAULT_POOL and pool not in self.released:
                self.released.add(pool)
                self._do(Act.RELEASE_POOL, number, pool=pool)

    def _complete_all(self, number: int) -> None:
        for address in self.completed:
            self.waiting.discard(address)
            self._do(Act.COMPLETE, number, Event("free_completed", address, 0, 0))
        self.completed.clear()


def repeat(
    case: Case, *, oldest_segment_first: bool, most_misses: int, on_sample: Callable[[int], None]
) -> Repetition:
    """Replay a recording under the settings that it was made with, from the memory before it."""
    recording, config, before, card_bytes = (
        case.recording,
        case.config,
        case.before,
        case.card_bytes,
    )
    card = RecordedCard(case.total_bytes or card_bytes or ENDLESS_BYTES)
    limited = config.garbage_collection_threshold > 0
    # The garbage collection counts against a limit; any other limit is in the driver's answers.
    driven = replace(config, throw_on_cudamalloc_oom=False, per_process_memory_fraction=1.0)
    allocator = DeviceCachingAllocator(
        card, recording.device, driven, oldest_segment_first=oldest_segment_first
    )
    allocator.set_memory_limit(card_bytes if limited else None)
    player = Player(allocator, card_bytes, len(recording.events), on_sample=on_sample)
    pools = {event.pool for event in recording.events} | {
        segment.pool for segment in recording.segments
    }
    player.use_pools(sorted(pools - {DEFAULT_POOL}))
    player.blocks.update(allocator.restore(before.segments, before.first_addresses))
    for segment in before.segments:
        first = before.first_addresses.get(range_key(segment), segment["address"])
        card.ranges.append(range(first, first + card.total_bytes * 9 // 8))
    player.start_counting()
    waiting = {address for address, block in player.blocks.items() if not block.allocated}
    repetition = Repetition(
        recording, config, card, player, card_bytes, most_misses, waiting=waiting
    )
    repetition.run()
    return repetition
