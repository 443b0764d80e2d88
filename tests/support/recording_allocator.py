"""A simulated allocator that records its history as PyTorch's does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from torchmem.allocator.settings import AllocatorConfig
from torchmem.allocator.snapshot import DEFAULT_POOL, PoolId, SegmentInfo
from torchmem.simulator.allocator import DeviceCachingAllocator
from torchmem.simulator.blocks import Block, BlockOrder, BlockPool
from torchmem.simulator.errors import OutOfMemoryError
from torchmem.simulator.gpu import ALIGNMENT, SimulatedGpu
from torchmem.trace.recording import Event, RecordedBlock, RecordedSegment, Recording


def pool_id(pool: BlockPool) -> PoolId:
    """Return the id of a pool as a snapshot has it."""
    return DEFAULT_POOL if pool.owner is None else pool.owner.id


class Placement:
    """Chooses the addresses of new memory: ascending, descending, reuse (lowest hole) or random."""

    def __init__(self, order: str, seed: int = 0) -> None:
        self._order, self._random = order, random.Random(seed)
        self._used: dict[int, int] = {}
        self._above = self._below = 1 << 44

    def reserve(self, size: int) -> int:
        """Return the start of `size` unused bytes."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        address = next(self._candidates(size))
        self._used[address] = size
        return address

    def free(self, address: int, size: int) -> None:
        """Return memory, which only "reuse" and "random" use again."""
        assert self._used[address] >= size
        if self._order in {"reuse", "random"}:
            del self._used[address]

    def _candidates(self, size: int) -> Iterator[int]:
        if self._order == "ascending":
            self._above += size
            yield self._above - size
        elif self._order == "descending":
            self._below -= size
            yield self._below
        starts = (
            (self._random.randrange(1 << 20) * ALIGNMENT for _ in count())
            if self._order == "random"
            else (address + used for address, used in [(0, ALIGNMENT), *sorted(self._used.items())])
        )
        for start in starts:
            if not any(
                start < address + used and address < start + size
                for address, used in self._used.items()
            ):
                yield start


class RecordingGpu(SimulatedGpu):
    """A GPU that records which segments and pages its driver gives and takes back.

    `request` is the latest request: its stream and pool are those of new memory.
    """

    def __init__(self, total_bytes: int, placement: Placement | None = None) -> None:
        super().__init__(total_bytes, context_bytes=0)
        self._placement = placement
        self.events: list[Event] = []
        self.request = Event("alloc", 0, 0, 0)
        self._owners: dict[int, Event] = {}
        self._ranges: list[tuple[range, Event]] = []

    def cuda_malloc(self, size: int) -> int | None:
        address = super().cuda_malloc(size)
        if address is not None:
            event = replace(self.request, action="segment_alloc", address=address, size=size)
            self._owners[address] = event
            self.events.append(event)
        return address

    def cuda_free(self, address: int) -> None:
        event = replace(self._owners.pop(address), action="segment_free")
        self.events.append(event)
        super().cuda_free(address)
        if self._placement is not None:
            self._placement.free(address, event.size)

    def reserve_addresses(self, size: int) -> int:
        if self._placement is not None:
            address = self._placement.reserve(size)
        else:
            address = super().reserve_addresses(size)
        self._ranges.append((range(address, address + size), self.request))
        return address

    def mem_map(self, address: int, size: int) -> bool:
        mapped = super().mem_map(address, size)
        if mapped:
            self._record("segment_map", address, size)
        return mapped

    def mem_unmap(self, address: int, size: int) -> None:
        self._record("segment_unmap", address, size)
        super().mem_unmap(address, size)

    def _record(self, action: str, address: int, size: int) -> None:
        owner = next(owner for addresses, owner in self._ranges if address in addresses)
        self.events.append(replace(owner, action=action, address=address, size=size))


class RecordingAllocator(DeviceCachingAllocator):
    """An allocator with `torch.cuda.memory._record_memory_history` on, without stacks."""

    def __init__(
        self, gpu: RecordingGpu, config: AllocatorConfig, *, order: BlockOrder = "segment"
    ) -> None:
        super().__init__(gpu, config=config, order=order)
        self.recording_gpu = gpu
        self.events = gpu.events

    def malloc(self, orig_size: int, stream: int = 0) -> Block:
        size = self.config.round_size(orig_size)
        pool = pool_id(self.get_pool(size, stream))
        self.recording_gpu.request = Event("alloc", 0, orig_size, stream, pool)
        try:
            block = super().malloc(orig_size, stream)
        except OutOfMemoryError as error:
            if not error.details.rejected:
                free = error.details.free
                self.events.append(Event("oom", 0, size, stream, pool, device_free=free))
            raise
        self._record("alloc", block)
        return block

    def free(self, block: Block) -> None:
        self._record("free_requested", block)
        super().free(block)

    def free_block(self, block: Block) -> None:
        self._record("free_completed", block)
        super().free_block(block)

    def recording(self, settings: dict[str, Any], events: list[Event] | None = None) -> Recording:
        """Return the memory now, with all events or with the given ones."""
        return Recording(
            "simulated",
            self.device,
            tuple(map(recorded, self.memory_snapshot())),
            tuple(self.events if events is None else events),
            settings,
        )

    def _record(self, action: str, block: Block) -> None:
        size, pool = block.requested_size, pool_id(block.pool)
        self.events.append(Event(action, block.address, size, block.stream, pool))


def recorded(segment: SegmentInfo) -> RecordedSegment:
    """Return a segment as it is read from a file."""
    blocks = (
        RecordedBlock(block["address"], block["size"], block["requested_size"], block["state"])
        for block in segment["blocks"]
    )
    return RecordedSegment(
        segment["address"],
        segment["total_size"],
        segment["stream"],
        segment["segment_type"] == "small",
        segment["is_expandable"],
        segment["segment_pool_id"],
        tuple(blocks),
    )
