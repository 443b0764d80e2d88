"""Reproduces a recording under its own settings, to find out what its program did.

A trace mixes what the program did with what the allocator did. The reproduction separates the two:
driver calls that the simulated allocator does not make by itself were made by the program.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.sizes import SMALL_BUFFER, SMALL_SIZE
from torchmem.allocator.snapshot import DEFAULT_POOL, PoolId
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.gpu import GpuUse
from torchmem.simulator.snapshot import range_key
from torchmem.trace.recording import Event, Recording
from torchmem.whatif.executor import Executor, ReplayEndedError
from torchmem.whatif.inference import Inference
from torchmem.whatif.program import Operation, Program
from torchmem.whatif.replay import UNLIMITED_BYTES, NewGpu
from torchmem.whatif.run_facts import RunFacts

DRIVER_ALLOCS = frozenset({"segment_alloc", "segment_map"})
DRIVER_FREES = frozenset({"segment_free", "segment_unmap"})


class _UnlimitedUse(GpuUse):
    """Counts bytes without a limit: whether there was room is known from the recording."""

    def claim(self, size: int, capacity: int) -> bool:
        """Add `size` bytes."""
        return super().claim(size, capacity + self.total() + size)


class RecordedGpu(NewGpu):
    """A GPU that returns the recorded addresses, and refuses memory where the recorded GPU did.

    `total_bytes` determines only the size of the address ranges of expandable segments. `expected`
    are the driver's next events, up to the current request; `fails` is whether that request failed.
    Any other call gets an address that is in no recording. `later` yields the later mappings for
    the current stream and pool. `ranges` are the address ranges reserved so far.
    """

    def __init__(self, total_bytes: int = UNLIMITED_BYTES) -> None:
        super().__init__(total_bytes, context_bytes=0, use=_UnlimitedUse())
        self.expected: deque[Event] = deque()
        self.fails = False
        self.driver_free: int | None = None
        self.later: Callable[[], Iterator[Event]] = lambda: iter(())
        self.ranges: list[range] = []
        self._used: list[tuple[int, int]] = []

    def cuda_malloc(self, size: int) -> int | None:
        """Return the next recorded segment of this size, or None where the driver refused."""
        if self._refuses():
            return None
        event = self.expected[0] if self.expected else None
        is_recorded = event is not None and event.action == "segment_alloc" and event.size == size
        if event is None or not is_recorded or self._is_used(event):
            return self._unrecorded_segment(size)
        self.expected.popleft()
        self.adopt(event.address, size)
        return event.address

    def adopt(self, address: int, size: int) -> None:
        """Count a segment, and note its address."""
        super().adopt(address, size)
        insort(self._used, (address, size))

    def _is_used(self, event: Event) -> bool:
        """Return whether a part of a new segment is in use already: the recording is damaged."""
        following = bisect_left(self._used, (event.address, 0))
        before = self._used[following - 1] if following else (0, 0)
        behind = self._used[following : following + 1]
        overlaps = any(start < event.address + event.size for start, _ in behind)
        return overlaps or sum(before) > event.address

    def mem_map(self, address: int, size: int) -> bool:
        """Return whether the recorded driver had memory now."""
        if self._refuses():
            return False
        event = self.expected[0] if self.expected else None
        if event is not None and event.action == "segment_map" and event.size == size:
            self.expected.popleft()
        return super().mem_map(address, size)

    def reserve_addresses(self, size: int) -> int:
        """Return where memory is mapped now, otherwise where it is first mapped later.

        It must be outside of all ranges reserved so far.
        """
        now = (event.address for event in self.expected if event.action == "segment_map")
        later = (
            event.address
            for event in self.later()
            if not any(event.address in reserved for reserved in self.ranges)
        )
        address = next(now, None) or next(later, None)
        if address is None:
            address = super().reserve_addresses(size)
        self.ranges.append(range(address, address + size))
        return address

    def cuda_free(self, address: int) -> None:
        """Free a segment, and no longer expect that event."""
        super().cuda_free(address)
        del self._used[bisect_left(self._used, (address, 0))]
        self._drop(lambda event: event.action == "segment_free" and event.address == address)

    def mem_unmap(self, address: int, size: int) -> None:
        """Unmap pages, and no longer expect that event."""
        super().mem_unmap(address, size)
        self._drop(lambda event: event.action == "segment_unmap" and event.size == size)

    def mem_get_info(self) -> tuple[int, int]:
        """Return the free bytes that the event of the failed request reports."""
        free, total = super().mem_get_info()
        return (free if self.driver_free is None else self.driver_free), total

    def _unrecorded_segment(self, size: int) -> int:
        address = super().reserve_addresses(size)
        self.adopt(address, size)
        return address

    def _refuses(self) -> bool:
        return self.expected[0].action in DRIVER_FREES if self.expected else self.fails

    def _drop(self, matches: Callable[[Event], bool]) -> None:
        event = next((event for event in self.expected if matches(event)), None)
        if event is not None:
            self.expected.remove(event)


@dataclass(slots=True, eq=False)
class Reproduction:
    """One replay of a recording on the recorded addresses, and the program that it finds.

    `group` are the driver's events since the last instruction, and `completed` the addresses of the
    blocks whose wait ended since then. `doubtful` counts how often cache went back to the driver
    just before a request needed a segment: this counts as `torch.cuda.empty_cache()`, but may have
    been the allocator's own doing.
    """

    recording: Recording
    config: AllocatorConfig
    gpu: RecordedGpu
    executor: Executor
    gpu_bytes: int | None
    max_misses: int
    program: Program = field(default_factory=Program)
    released: set[PoolId] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    group: list[Event] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    allocations: int = 0
    landed: int = 0
    first_miss: int | None = None
    doubtful: int = 0

    @property
    def misses(self) -> int:
        """The number of allocations that did not get their recorded address."""
        return self.allocations - self.landed

    def run(self) -> None:
        """Reproduce the recording, but stop after more than `max_misses` misses."""
        freed = -1
        events = self.recording.events
        for number, event in enumerate(events):
            action = event.action
            if action == "alloc":
                self._request(number, event, Operation.MALLOC)
            elif action == "free_requested":
                freed = self._free(number, event)
            elif action == "free_completed":
                if event.address != freed:
                    self.completed.append(event.address)
                freed = -1
            elif action == "oom":
                self._request(number, event, Operation.TRY_MALLOC)
            elif action in DRIVER_ALLOCS or action in DRIVER_FREES:
                self.group.append(event)
            if self.misses > self.max_misses:
                return
        self._end_group(len(events) - 1)
        self.executor.sample(len(events))

    def _execute(
        self,
        operation: Operation,
        number: int,
        event: Event | None = None,
        pool: PoolId = DEFAULT_POOL,
    ) -> None:
        place = (0, 0, 0) if event is None else (event.address, event.size, event.stream)
        instruction = (operation, number, *place, pool)
        self.program.append(instruction)
        self.executor.execute(instruction)

    def _free(self, number: int, event: Event) -> int:
        """Free a block; return its address if the next event completes that, otherwise -1."""
        self._end_group(number)
        events = self.recording.events
        following = events[number + 1] if number + 1 < len(events) else None
        key = None if following is None else (following.action, following.address)
        if key == ("free_completed", event.address):
            self._execute(Operation.FREE, number, event)
            return event.address
        self.waiting.add(event.address)
        self._execute(Operation.FREE_LATER, number, event)
        return -1

    def _request(self, number: int, event: Event, operation: Operation) -> None:
        frees = [other for other in self.group if other.action in DRIVER_FREES]
        # Blocks that a flush waited for became free only after the search for a free block.
        flushed = operation is Operation.TRY_MALLOC or self._is_flush(frees)
        waits_on = not self.waiting <= set(self.completed)
        if waits_on or not flushed:
            self._complete_all(number)
        self.executor.pool = event.pool
        if frees and self._is_empty_cache(event, frees, operation, waits_on=waits_on):
            self._empty_cache(number, frees)
            last = max(i for i, other in enumerate(self.group) if other.action in DRIVER_FREES)
            del self.group[: last + 1]
        else:
            self._release_pools(number, frees)
        self._malloc(number, event, operation)
        self._complete_all(number)
        self.group.clear()

    def _is_flush(self, frees: list[Event]) -> bool:
        """Return whether all releasable memory went back.

        The garbage collection and the rules for oversize blocks release only a part of it.
        """
        releases_parts = (
            self.config.max_split_size is not None or self.config.garbage_collection_threshold
        )
        size = sum(event.size for event in frees)
        releasable = self.executor.allocator.releasable_bytes
        return size > 0 and not (releases_parts and size < releasable())

    def _malloc(self, number: int, event: Event, operation: Operation) -> None:
        gpu = self.gpu
        gpu.expected, gpu.fails = deque(self.group), operation is Operation.TRY_MALLOC
        gpu.driver_free = event.device_free
        gpu.later = partial(self._mapped_later, number - len(self.group), event)
        try:
            self._execute(operation, number, event, event.pool)
        except ReplayEndedError:
            block = None
        else:
            block = self.executor.blocks.get(event.address)
        gpu.expected, gpu.fails, gpu.driver_free = deque(), False, None
        if operation is Operation.MALLOC:
            self.allocations += 1
            if block is not None and block.address == event.address:
                self.landed += 1
            elif self.first_miss is None:
                self.first_miss = number

    def _mapped_later(self, first: int, request: Event) -> Iterator[Event]:
        is_small = self.config.round_size(request.size) <= SMALL_SIZE
        for event in islice(self.recording.events, first, None):
            matches = event.action == "segment_map" and (event.size == SMALL_BUFFER) == is_small
            if matches and event.stream == request.stream and event.pool == request.pool:
                yield event

    def _is_empty_cache(
        self, event: Event, frees: list[Event], operation: Operation, *, waits_on: bool
    ) -> bool:
        """Return whether the program released cache before a request, not the allocator for it."""
        if operation is Operation.TRY_MALLOC or waits_on:
            return False  # empty_cache would have waited for all streams
        # A retry would have asked for new memory after it gave the cache back.
        if self.group[-1].action in DRIVER_FREES:
            return True
        config, allocator = self.config, self.executor.allocator
        if config.max_split_size is None and allocator.would_reuse(event.size, event.stream):
            return True
        if self.gpu_bytes is not None:
            added = sum(other.size for other in self.group if other.action in DRIVER_ALLOCS)
            # The new memory had no room beside the cache: the allocator's retry made it.
            if allocator.stats.reserved_bytes.current + added > self.gpu_bytes:
                return False
        if config.max_split_size is not None or config.garbage_collection_threshold:
            return self._is_flush(frees)
        self.doubtful += self.gpu_bytes is None
        return True

    def _end_group(self, number: int) -> None:
        """Attribute driver events without a request to the program."""
        frees = [event for event in self.group if event.action in DRIVER_FREES]
        if frees:
            self._empty_cache(number, frees)
        self.group.clear()
        self._complete_all(number)

    def _empty_cache(self, number: int, frees: Iterable[Event]) -> None:
        self._release_pools(number, frees)
        pools = dict.fromkeys(event.pool for event in frees)
        self.gpu.expected = deque()
        if DEFAULT_POOL in pools:
            self._execute(Operation.EMPTY_CACHE, number)
            return
        for pool in pools:
            self._execute(Operation.EMPTY_POOL, number, pool=pool)

    def _release_pools(self, number: int, frees: Iterable[Event]) -> None:
        """Release the private pools that gave memory back: only pools without users do."""
        for pool in dict.fromkeys(event.pool for event in frees):
            if pool != DEFAULT_POOL and pool not in self.released:
                self.released.add(pool)
                self._execute(Operation.RELEASE_POOL, number, pool=pool)

    def _complete_all(self, number: int) -> None:
        for address in self.completed:
            self.waiting.discard(address)
            self._execute(Operation.COMPLETE, number, Event("free_completed", address, 0, 0))
        self.completed.clear()


def reproduce(
    run: RunFacts,
    inference: Inference,
    *,
    max_misses: int,
    on_sample: Callable[[int], None],
) -> Reproduction:
    """Replay a recording under its own settings, starting from the memory before it."""
    recording, config = run.recording, run.settings.config
    gpu_bytes = run.gpu_bytes if run.fits_gpu else None
    total_bytes = run.total_bytes if run.fits_gpu else None
    gpu = RecordedGpu(total_bytes or gpu_bytes or UNLIMITED_BYTES)
    allocator = DeviceCachingAllocator(
        gpu,
        recording.device,
        # Only the garbage collection needs a limit; the recorded driver answers contain all others.
        replace(config, throw_on_cudamalloc_oom=False, per_process_memory_fraction=1.0),
        order=inference.order,
    )
    collects = config.garbage_collection_threshold > 0
    allocator.set_memory_limit(run.limit_bytes if collects else None)
    executor = Executor(allocator, gpu_bytes, run.events, on_sample=on_sample)
    _restore(run, inference, executor, gpu)
    waiting = {address for address, block in executor.blocks.items() if not block.allocated}
    reproduction = Reproduction(
        recording, config, gpu, executor, gpu_bytes, max_misses, waiting=waiting
    )
    reproduction.run()
    return reproduction


def _restore(run: RunFacts, inference: Inference, executor: Executor, gpu: RecordedGpu) -> None:
    """Load the memory before the trace."""
    recording, before = run.recording, inference.before
    pools = {event.pool for event in recording.events}
    pools |= {segment.pool for segment in recording.segments}
    executor.use_pools(sorted(pools - {DEFAULT_POOL}))
    blocks = executor.allocator.restore(
        before.segments, before.first_addresses, inference.oldest_first
    )
    executor.blocks.update(blocks)
    for segment in before.segments:
        first = before.first_addresses.get(range_key(segment), segment["address"])
        gpu.ranges.append(range(first, first + gpu.total_bytes * 9 // 8))
    executor.start_counting()
