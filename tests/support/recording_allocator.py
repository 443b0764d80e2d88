"""A simulated allocator that records its history as PyTorch's does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import DEFAULT_POOL, SegmentInfo
from torchmem.recording.recording import Event, PoolId, RecordedBlock, RecordedSegment, Recording
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import AllocParams, Block, BlockPool
from torchmem.simulator.card import SimulatedCard
from torchmem.simulator.device_memory import CachedBlocks
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.expandable_segments import ExpandableSegments


def pool_id(pool: BlockPool) -> PoolId:
    """The pool's id as a snapshot tells it."""
    return DEFAULT_POOL if pool.owner is None else pool.owner.id


class RecordingRanges(ExpandableSegments):
    """Notes what is mapped and unmapped."""

    events: list[Event]

    def map_block(self, to_map: Block, size: int) -> bool:
        address, before = to_map.address, self.stats.reserved_bytes.current
        mapped = super().map_block(to_map, size)
        if mapped:
            size = self.stats.reserved_bytes.current - before
            self.events.append(
                Event("segment_map", address, size, to_map.stream, pool_id(to_map.pool))
            )
        return mapped

    def _unmapped(self, block: Block, begin: int, end: int) -> None:
        self.events.append(
            Event("segment_unmap", begin, end - begin, block.stream, pool_id(block.pool))
        )
        super()._unmapped(block, begin, end)


class RecordingCard(SimulatedCard):
    """Notes which segments it takes back."""

    events: list[Event]
    owners: dict[int, Event]

    def cuda_free(self, address: int) -> None:
        self.events.append(replace(self.owners.pop(address), action="segment_free"))
        super().cuda_free(address)


class RecordingCache(CachedBlocks):
    """Notes which segments the driver gives."""

    events: list[Event]

    def cuda_malloc(self, params: AllocParams) -> Block | None:
        block = super().cuda_malloc(params)
        if block is not None:
            event = Event(
                "segment_alloc", block.address, block.size, block.stream, pool_id(block.pool)
            )
            self.events.append(event)
            assert isinstance(self.card, RecordingCard)
            self.card.owners[block.address] = event
        return block


class RecordingAllocator(DeviceCachingAllocator):
    """`torch.cuda.memory._record_memory_history` and `_snapshot`, without stacks; its card must be a RecordingCard."""

    def __init__(
        self, card: RecordingCard, config: AllocatorConfig, *, oldest_segment_first: bool = True
    ) -> None:
        super().__init__(card, config=config, oldest_segment_first=oldest_segment_first)
        self.events = card.events = list[Event]()
        card.owners = {}
        ranges = self._memory.expandable_segments
        noting = RecordingRanges(
            ranges.card, ranges.stats, ranges.large_segment_size, ranges.counter
        )
        object.__setattr__(noting, "events", self.events)
        self._memory.expandable_segments = noting
        cached = RecordingCache(
            card,
            self._memory.cached.stats,
            noting,
            self._memory.cached.max_split_size,
            ranges.counter,
        )
        object.__setattr__(cached, "events", self.events)
        self._memory.cached = cached

    def malloc(self, orig_size: int, stream: int = 0) -> Block:
        try:
            block = super().malloc(orig_size, stream)
        except OutOfMemoryError as error:
            size = self.config.round_size(orig_size)
            pool = pool_id(self._get_pool(size, stream))
            if not error.details.rejected:
                self.events.append(
                    Event("oom", 0, size, stream, pool, device_free=error.details.free)
                )
            raise
        self.events.append(Event("alloc", block.address, orig_size, stream, pool_id(block.pool)))
        return block

    def free(self, block: Block) -> None:
        self._note("free_requested", block)
        super().free(block)

    def _free_block(self, block: Block) -> None:
        self._note("free_completed", block)
        super()._free_block(block)

    def _note(self, action: str, block: Block) -> None:
        event = Event(
            action, block.address, block.requested_size, block.stream, pool_id(block.pool)
        )
        self.events.append(event)

    def recording(self, settings: dict[str, Any], events: list[Event] | None = None) -> Recording:
        """The memory now, with all events or with those given."""
        segments = tuple(map(recorded, self.memory_snapshot()))
        return Recording(
            "simulated",
            self.device,
            segments,
            tuple(self.events if events is None else events),
            settings,
        )


def recorded(segment: SegmentInfo) -> RecordedSegment:
    """A segment as it is read from a file."""
    blocks = (
        RecordedBlock(block["address"], block["size"], block["requested_size"], block["state"])
        for block in segment["blocks"]
    )
    return RecordedSegment(
        segment["address"], segment["total_size"], segment["stream"], segment["segment_type"] == "small",
        segment["is_expandable"], segment["segment_pool_id"], tuple(blocks),
    )  # fmt: skip
